"""Settings of services for which a busy machine does not look like an outage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
