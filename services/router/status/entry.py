"""One turn as the status page shows it: its receipt and when its legs ran."""

from __future__ import annotations

from dataclasses import dataclass

from kvloop.common.v1 import common_pb2
from services.router import receipt
from services.router.turn_state import Turn

_MISS_PREFIX = "MISS_REASON_"
_FIRST = frozenset(
    {
        common_pb2.MISS_REASON_FIRST_TURN,
        common_pb2.MISS_REASON_NO_CONVERSATION,
        common_pb2.MISS_REASON_REUSE_DISABLED,
        common_pb2.MISS_REASON_UNSUPPORTED,
    }
)
"""Misses of turns that no handle could have been expected for."""


@dataclass(frozen=True, slots=True)
class TurnEntry:
    """A turn that has ended. No part of its content."""

    turn_id: str
    tenant: str
    model: str
    conversation_id: str
    """As the caller or the history names it; empty if neither does."""
    number: int
    """Number in the conversation; 0 if unknown."""
    started: float
    """Seconds since the epoch."""
    outcome: str
    error: str
    """Reason of the error that ended it; empty if none did."""
    prefill_worker_id: str
    decode_worker_id: str
    handle_hit: bool
    is_followup: bool
    """Whether retained KV could be expected."""
    miss_reason: str
    """Name of a MissReason; empty if tokens were pulled."""
    prompt_tokens: int
    completion_tokens: int
    proven: int
    pulled: int
    cached: int
    recomputed: int
    retained: int
    """Tokens that the turn left behind for the next one."""
    prefill_start: float | None
    """Seconds after the start of the turn; None if there was no prefill leg."""
    prefill_seconds: float
    pull_seconds: float | None
    """Part of the prefill leg in which KV was pulled; None if none was."""
    decode_start: float | None
    """Seconds after the start of the turn; None if it never came to that."""
    ttft: float | None
    """Seconds; None if no chunk came."""
    total_seconds: float


def entry_of(turn: Turn, *, outcome: str, error: str, now: float, wall: float) -> TurnEntry:
    """What shall be remembered of a turn.

    Args:
        turn: the turn as its pipeline left it.
        outcome: how it ended.
        error: reason of the error that ended it, or empty.
        now: reading of the router's clock, at the end.
        wall: seconds since the epoch, at the end.
    """
    report = turn.report or common_pb2.PrefillReport()
    total = now - turn.started
    reason = receipt.miss_reason(turn)
    pull = report.pull_duration.ToTimedelta().total_seconds()
    decode_start = None if turn.decode_started is None else turn.decode_started - turn.started
    return TurnEntry(
        turn_id=turn.turn_id,
        tenant=turn.request.tenant,
        model=turn.request.model,
        conversation_id=turn.key.conversation_id if turn.key else turn.request.conversation_id,
        number=turn.number,
        started=wall - total,
        outcome=outcome,
        error=error,
        prefill_worker_id=turn.prefill_worker.worker_id if turn.prefill_worker else "",
        decode_worker_id=turn.decode_worker.worker_id if turn.decode_worker else "",
        handle_hit=turn.handle_hit,
        is_followup=reason not in _FIRST,
        miss_reason=""
        if reason == common_pb2.MISS_REASON_UNSPECIFIED
        else common_pb2.MissReason.Name(reason).removeprefix(_MISS_PREFIX),
        prompt_tokens=report.prompt_tokens
        or (turn.summary.usage.prompt_tokens if turn.summary else 0),
        completion_tokens=turn.summary.usage.completion_tokens if turn.summary else 0,
        proven=report.proven_tokens,
        pulled=report.pulled_tokens,
        cached=report.cached_tokens,
        recomputed=report.recomputed_tokens,
        retained=turn.summary.retained_tokens if turn.summary else 0,
        prefill_start=_prefill_start(turn, decode_start),
        prefill_seconds=turn.prefill_seconds,
        pull_seconds=pull if report.HasField("pull_duration") else None,
        decode_start=decode_start,
        ttft=receipt.ttft_seconds(turn) if turn.first_chunk_at is not None else None,
        total_seconds=total,
    )


def _prefill_start(turn: Turn, decode_start: float | None) -> float | None:
    """The decode leg begins when the prefill leg has ended."""
    if turn.prefill_worker is None or decode_start is None:
        return None
    return max(decode_start - turn.prefill_seconds, 0.0)
