"""The receipt of a turn: a pure function of the turn's state."""

from __future__ import annotations

from kvloop.common.v1 import common_pb2
from kvloop.durations import to_duration
from kvloop.router.v1 import router_pb2
from kvloop.worker.v1 import worker_pb2
from services.router.turn_state import Turn

_RETAIN_OUTCOMES: dict[int, router_pb2.RetainOutcome.ValueType] = {
    worker_pb2.COMMIT_OUTCOME_COMMITTED: router_pb2.RETAIN_OUTCOME_RETAINED,
    worker_pb2.COMMIT_OUTCOME_NOT_REQUESTED: router_pb2.RETAIN_OUTCOME_NOT_REQUESTED,
    worker_pb2.COMMIT_OUTCOME_NOT_PINNED: router_pb2.RETAIN_OUTCOME_NOT_PINNED,
    worker_pb2.COMMIT_OUTCOME_SUPERSEDED: router_pb2.RETAIN_OUTCOME_SUPERSEDED,
    worker_pb2.COMMIT_OUTCOME_LEDGER_UNAVAILABLE: router_pb2.RETAIN_OUTCOME_LEDGER_UNAVAILABLE,
    worker_pb2.COMMIT_OUTCOME_NO_EVENT: router_pb2.RETAIN_OUTCOME_NO_EVENT,
}


def build_result(turn: Turn) -> router_pb2.TurnResult:
    """The last event of a turn that was answered."""
    summary = turn.summary or worker_pb2.DecodeSummary()
    return router_pb2.TurnResult(
        usage=summary.usage,
        receipt=_receipt(turn, summary),
        client_request_id=turn.request.client_request_id,
    )


def miss_reason(turn: Turn) -> common_pb2.MissReason.ValueType:
    """Why the turn pulled nothing; unspecified if it did pull."""
    if turn.miss_reason != common_pb2.MISS_REASON_UNSPECIFIED or turn.report is None:
        return turn.miss_reason
    if turn.report.pulled_tokens:
        return common_pb2.MISS_REASON_UNSPECIFIED
    # An engine without kvloop's connector pulls nothing and gives no reason.
    return turn.report.miss_reason or common_pb2.MISS_REASON_UNPROVABLE


def ttft_seconds(turn: Turn) -> float:
    """Start of the turn to its first chunk; 0 if none came."""
    return turn.first_chunk_at - turn.started if turn.first_chunk_at is not None else 0.0


def decode_leg_seconds(turn: Turn) -> float:
    """Start of the decode leg to the first chunk; 0 if none came."""
    if turn.first_chunk_at is None or turn.decode_started is None:
        return 0.0
    return turn.first_chunk_at - turn.decode_started


def _receipt(turn: Turn, summary: worker_pb2.DecodeSummary) -> router_pb2.Receipt:
    return router_pb2.Receipt(
        turn_id=turn.turn_id,
        turn=turn.number,
        prefill_worker_id=turn.prefill_worker.worker_id if turn.prefill_worker else "",
        decode_worker_id=turn.decode_worker.worker_id if turn.decode_worker else "",
        handle_hit=turn.handle_hit,
        miss_reason=miss_reason(turn),
        prefill=turn.report,
        ttft=to_duration(max(ttft_seconds(turn), 0.0)),
        prefill_leg=to_duration(max(turn.prefill_seconds, 0.0)),
        decode_leg=to_duration(max(decode_leg_seconds(turn), 0.0)),
        retain_outcome=_RETAIN_OUTCOMES.get(
            summary.commit_outcome, router_pb2.RETAIN_OUTCOME_UNSPECIFIED
        ),
        retained_tokens=summary.retained_tokens,
        retained_ttl=summary.granted_ttl if summary.HasField("granted_ttl") else None,
    )
