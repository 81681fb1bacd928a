"""Tells of attempts at a leg that failed: in the turn's trace and in the log."""

from __future__ import annotations

import structlog

from kvloop.errors import KvloopError
from services.common.span_attributes import WORKER_ID
from services.common.tracing import ERROR_TYPE, current

_log = structlog.get_logger(__name__)


def tell_of_failure(
    entry: str, turn_id: str, worker_id: str, error: KvloopError, **facts: bool
) -> None:
    """An attempt has failed.

    Args:
        entry: name of the log entry.
        turn_id: of the turn.
        worker_id: where the leg ran.
        error: why it failed.
        facts: more that the log entry says.
    """
    current().event("attempt_failed", {ERROR_TYPE: error.reason, WORKER_ID: worker_id})
    _log.warning(entry, turn_id=turn_id, worker_id=worker_id, reason=error.reason, **facts)
