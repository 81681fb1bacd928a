"""Seconds and google.protobuf.Duration."""

from __future__ import annotations

from google.protobuf import duration_pb2


def to_duration(seconds: float) -> duration_pb2.Duration:
    """A Duration, exact to the nanosecond."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1_000_000_000))
    return duration


def to_seconds(duration: duration_pb2.Duration) -> float:
    """Seconds of a Duration."""
    return duration.ToNanoseconds() / 1_000_000_000
