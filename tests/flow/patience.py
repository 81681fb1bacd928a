"""Settings of services for which a busy machine does not look like an outage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HELD_UP_SECONDS = 4.0
"""Longer than a busy machine keeps a process from running: a limit that is to be met, but
only once something has happened."""

PATIENT_WORKER: Mapping[str, Any] = {
    "engine_connect_timeout_seconds": 20,
    "event_timeout_seconds": 20,
    "commit_timeout_seconds": 20,
}
PATIENT_ROUTER: Mapping[str, Any] = {
    "ledger_timeout_seconds": 20,
    "ledger_call_timeout_seconds": 20,
    "connect_timeout_seconds": 20,
    "estimate_timeout_seconds": 20,
}


def flags(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings as a service's process takes them."""
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())
