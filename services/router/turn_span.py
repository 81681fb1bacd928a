"""The receipt of a turn as attributes of its span; no part of its content."""

from __future__ import annotations

from kvloop.common.v1 import common_pb2
from services.common.span_attributes import (
    COMPLETION_TOKENS,
    HANDLE_HIT,
    PROMPT_TOKENS,
    RETAINED_TOKENS,
    TURN_ID,
    TURN_NUMBER,
    miss_attributes,
    report_attributes,
)
from services.common.tracing import AttributeValue
from services.router import receipt
from services.router.turn_state import Turn


def turn_attributes(turn: Turn, outcome: str) -> dict[str, AttributeValue]:
    """What the span of a turn says when the turn has ended.

    Args:
        turn: as its pipeline left it.
        outcome: how it ended.
    """
    attributes: dict[str, AttributeValue] = {
        TURN_ID: turn.turn_id,
        "kvloop.outcome": outcome,
        "kvloop.api": common_pb2.Api.Name(turn.request.api).removeprefix("API_").lower(),
        "kvloop.streamed": not turn.request.whole,
        HANDLE_HIT: turn.handle_hit,
        **miss_attributes(receipt.miss_reason(turn)),
    }
    if turn.decode_worker is not None:  # else the name may be any text of the caller's
        attributes["kvloop.model"] = turn.request.model
        attributes["kvloop.decode_worker_id"] = turn.decode_worker.worker_id
    if turn.number:
        attributes[TURN_NUMBER] = turn.number
    if turn.prefill_worker is not None:
        attributes["kvloop.prefill_worker_id"] = turn.prefill_worker.worker_id
    if turn.summary is not None:
        attributes[PROMPT_TOKENS] = turn.summary.usage.prompt_tokens
        attributes[COMPLETION_TOKENS] = turn.summary.usage.completion_tokens
        attributes[RETAINED_TOKENS] = turn.summary.retained_tokens
    if turn.report is not None:
        attributes |= report_attributes(turn.report)
    if turn.first_chunk_at is not None:
        attributes["kvloop.ttft_seconds"] = receipt.ttft_seconds(turn)
    return attributes
