"""What kvloop says it did for a turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvloop.common.v1 import common_pb2
from kvloop.durations import to_seconds
from kvloop.router.v1 import router_pb2

_MISS_REASON = "MISS_REASON_"


def enum_name(name_of: Callable[[Any], str], number: int, prefix: str) -> str:
    """The value's name less its prefix; its number if it is newer than this client."""
    try:
        return name_of(number).removeprefix(prefix)
    except ValueError:
        return str(number)


def miss_reason_name(number: int) -> str | None:
    """Name of a miss reason, such as "FIRST_TURN"; None if there was no miss."""
    if number == common_pb2.MISS_REASON_UNSPECIFIED:
        return None
    return enum_name(common_pb2.MissReason.Name, number, _MISS_REASON)


def miss_reason_number(name: str | None) -> common_pb2.MissReason.ValueType:
    """The miss reason of that name; unspecified if there was no miss, or none we know."""
    known = dict(common_pb2.MissReason.items())
    return known.get(f"{_MISS_REASON}{name}", common_pb2.MISS_REASON_UNSPECIFIED)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the decode engine reports them.

    Attributes:
        prompt_tokens: tokens in the prompt.
        completion_tokens: tokens generated, over all choices.
    """

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What kvloop did for one turn, and what it gained.

    The prompt's tokens add up: pulled + cached + recomputed = prompt_tokens.

    Attributes:
        turn_id: id of the turn in the logs of every service.
        turn: number of the turn in its conversation, from 1; 0 without one.
        prefill_worker_id: ran the prefill leg; "" if there was none.
        decode_worker_id: ran the decode leg.
        handle_hit: the ledger gave out the conversation's handle.
        miss_reason: why nothing was pulled, such as "FIRST_TURN" or "EXPIRED";
            None if tokens were pulled. Names are those of MissReason in
            protos/kvloop/common/v1/common.proto.
        prompt_tokens: tokens in the prompt.
        proven_tokens: leading tokens proven equal to what decode holds.
        pulled_tokens: tokens whose KV was pulled from decode.
        cached_tokens: tokens found in prefill's own prefix cache.
        recomputed_tokens: tokens whose KV was computed.
        ttft_seconds: from the start of the turn to its first chunk.
        prefill_leg_seconds: part of that spent in the prefill leg.
        decode_leg_seconds: part from the start of the decode leg.
        retain_outcome: what became of this turn's own KV, such as "RETAINED".
        retained_tokens: tokens kept on decode for the next turn.
        retained_ttl_seconds: how long the next turn can have them.
        pull_seconds: how long the pull took; None if nothing was pulled.
        expected_pull_seconds: what pulling all that was proven and not cached was
            expected to take; None while the link is not measured.
        expected_recompute_seconds: what computing the same tokens was expected to
            take; None while the engine's speed is not measured.
    """

    turn_id: str
    turn: int
    prefill_worker_id: str
    decode_worker_id: str
    handle_hit: bool
    miss_reason: str | None
    prompt_tokens: int
    proven_tokens: int
    pulled_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    ttft_seconds: float
    prefill_leg_seconds: float
    decode_leg_seconds: float
    retain_outcome: str
    retained_tokens: int
    retained_ttl_seconds: float
    pull_seconds: float | None = None
    expected_pull_seconds: float | None = None
    expected_recompute_seconds: float | None = None


def optional_seconds(message: Any, name: str) -> float | None:
    """Seconds of a Duration member; None if it is absent."""
    return to_seconds(getattr(message, name)) if message.HasField(name) else None


def parse_usage(usage: common_pb2.Usage) -> Usage:
    """Usage from its protobuf message."""
    return Usage(usage.prompt_tokens, usage.completion_tokens)


def parse_receipt(receipt: router_pb2.Receipt) -> Receipt:
    """A receipt from its protobuf message."""
    prefill = receipt.prefill
    return Receipt(
        turn_id=receipt.turn_id,
        turn=receipt.turn,
        prefill_worker_id=receipt.prefill_worker_id,
        decode_worker_id=receipt.decode_worker_id,
        handle_hit=receipt.handle_hit,
        miss_reason=miss_reason_name(receipt.miss_reason),
        prompt_tokens=prefill.prompt_tokens,
        proven_tokens=prefill.proven_tokens,
        pulled_tokens=prefill.pulled_tokens,
        cached_tokens=prefill.cached_tokens,
        recomputed_tokens=prefill.recomputed_tokens,
        ttft_seconds=to_seconds(receipt.ttft),
        prefill_leg_seconds=to_seconds(receipt.prefill_leg),
        decode_leg_seconds=to_seconds(receipt.decode_leg),
        retain_outcome=enum_name(
            router_pb2.RetainOutcome.Name, receipt.retain_outcome, "RETAIN_OUTCOME_"
        ),
        retained_tokens=receipt.retained_tokens,
        retained_ttl_seconds=to_seconds(receipt.retained_ttl),
        pull_seconds=optional_seconds(prefill, "pull_duration"),
        expected_pull_seconds=optional_seconds(prefill, "expected_pull"),
        expected_recompute_seconds=optional_seconds(prefill, "expected_recompute"),
    )
