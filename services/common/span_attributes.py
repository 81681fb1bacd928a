"""What spans of several services say, in the same words."""

from __future__ import annotations

from kvloop.common.v1 import common_pb2
from services.common.tracing import AttributeValue

TURN_ID = "kvloop.turn_id"
"""Id of the turn inside kvloop, as in every service's log."""
HANDLE_HIT = "kvloop.handle_hit"
MISS_REASON = "kvloop.miss_reason"
TURN_NUMBER = "kvloop.turn_number"
RETAINED_TOKENS = "kvloop.retained_tokens"
WORKER_ID = "kvloop.worker_id"
PROMPT_TOKENS = "kvloop.prompt_tokens"
COMPLETION_TOKENS = "kvloop.completion_tokens"

_MISS_PREFIX = "MISS_REASON_"


def report_attributes(report: common_pb2.PrefillReport) -> dict[str, AttributeValue]:
    """What a prefill engine did with a prompt."""
    return {
        PROMPT_TOKENS: report.prompt_tokens,
        "kvloop.proven_tokens": report.proven_tokens,
        "kvloop.pulled_tokens": report.pulled_tokens,
        "kvloop.cached_tokens": report.cached_tokens,
        "kvloop.recomputed_tokens": report.recomputed_tokens,
    }


def miss_attributes(reason: common_pb2.MissReason.ValueType) -> dict[str, AttributeValue]:
    """Why nothing was pulled; empty if something was."""
    if reason == common_pb2.MISS_REASON_UNSPECIFIED:
        return {}
    return {MISS_REASON: common_pb2.MissReason.Name(reason).removeprefix(_MISS_PREFIX)}
