"""What is known of pulls, in the words of the protos. Pure functions."""

from __future__ import annotations

from google.protobuf import duration_pb2

from kvloop.common.v1 import common_pb2
from kvloop.durations import to_duration
from kvloop.receipts import miss_reason_number
from kvloop.worker.v1 import worker_pb2
from services.worker.handoff import PrefillReport
from services.worker.pull_costs import Link
from services.worker.pull_plan import PullPlan, RecomputeCost

_SHORT_PROMPT = 1024
"""Tokens."""


def prefill_report(report: PrefillReport) -> common_pb2.PrefillReport:
    """What the engine did with a prompt."""
    return common_pb2.PrefillReport(
        prompt_tokens=report.prompt_tokens,
        proven_tokens=report.proven_tokens,
        pulled_tokens=report.pulled_tokens,
        cached_tokens=report.cached_tokens,
        recomputed_tokens=report.recomputed_tokens,
        miss_reason=miss_reason_number(report.miss_reason),
        pull_duration=_duration(report.pull_seconds),
        expected_pull=_duration(report.expected_pull_seconds),
        expected_recompute=_duration(report.expected_recompute_seconds),
    )


def link_estimate(link: Link) -> worker_pb2.LinkEstimate:
    """What was measured of a link."""
    return worker_pb2.LinkEstimate(
        engine=common_pb2.EngineRef(engine_id=link.engine.engine_id, epoch=link.engine.epoch),
        samples=link.samples,
        tokens_per_second=link.tokens_per_second,
        bytes_per_second=link.bytes_per_second,
        latency=to_duration(link.latency_seconds),
        held_back=link.held_back,
    )


def pull_estimate(decided: PullPlan) -> worker_pb2.EstimatePullResponse:
    """What would become of a pull."""
    return worker_pb2.EstimatePullResponse(
        pull=_duration(decided.expected_pull_seconds),
        recompute=_duration(decided.expected_recompute_seconds),
        pull_tokens=decided.tokens,
        reason=decided.reason,
    )


def tokens_per_second(recompute: RecomputeCost | None) -> float:
    """Rate of computing a short prompt on an empty context; 0 if unknown."""
    seconds = recompute.seconds(0, _SHORT_PROMPT) if recompute is not None else 0.0
    return _SHORT_PROMPT / seconds if seconds > 0 else 0.0


def _duration(seconds: float | None) -> duration_pb2.Duration | None:
    return to_duration(max(seconds, 0.0)) if seconds is not None else None
