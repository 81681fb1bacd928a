"""What the router says about models, routes and ended conversations."""

from __future__ import annotations

from dataclasses import dataclass

from kvloop.common.v1 import common_pb2
from kvloop.durations import to_seconds
from kvloop.receipts import enum_name, miss_reason_name, optional_seconds
from kvloop.router.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model that can be served now.

    Attributes:
        name: served model name.
        max_model_len: tokens that prompt and answer may have together.
        prefill_workers: live prefill workers.
        decode_workers: live decode workers.
    """

    name: str
    max_model_len: int
    prefill_workers: int
    decode_workers: int


@dataclass(frozen=True, slots=True)
class EndedConversation:
    """Outcome of ending a conversation.

    Attributes:
        found: the ledger knew it.
        released: retained KV was given up by this call.
    """

    found: bool
    released: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker that the router considered.

    Attributes:
        worker_id: worker considered.
        role: "PREFILL" or "DECODE".
        in_flight: turns that this router has in flight there.
        score: lower is better; comparable within one route only.
        chosen: it would be used.
        reason: why this score, in words.
    """

    worker_id: str
    role: str
    in_flight: int
    score: float
    chosen: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Route:
    """Where a turn would go now, and whether its handle could be used.

    Attributes:
        candidates: prefill first, best first.
        handle_available: the ledger holds a handle that the turn would get.
        miss_reason: why not, if not.
        retained_tokens: tokens that the retained sequence has.
        remaining_ttl_seconds: until the ledger stops giving the handle out.
        expected_pull_seconds: what pulling all retained tokens would take; None
            while the link is not measured.
        expected_recompute_seconds: what computing them would take; None while the
            engine's speed is not measured.
        pull_tokens: tokens that would be pulled: all, a small probe, or none.
        pull_reason: why so many, in words.
    """

    candidates: tuple[Candidate, ...]
    handle_available: bool
    miss_reason: str | None
    retained_tokens: int
    remaining_ttl_seconds: float
    expected_pull_seconds: float | None = None
    expected_recompute_seconds: float | None = None
    pull_tokens: int = 0
    pull_reason: str = ""


def parse_models(response: router_pb2.ListModelsResponse) -> list[ModelInfo]:
    """Models from their protobuf message."""
    return [
        ModelInfo(
            name=model.name,
            max_model_len=model.max_model_len,
            prefill_workers=model.prefill_workers,
            decode_workers=model.decode_workers,
        )
        for model in response.models
    ]


def parse_route(response: router_pb2.ExplainRouteResponse) -> Route:
    """A route from its protobuf message."""
    return Route(
        candidates=tuple(
            Candidate(
                worker_id=candidate.worker_id,
                role=enum_name(common_pb2.WorkerRole.Name, candidate.role, "WORKER_ROLE_"),
                in_flight=candidate.in_flight,
                score=candidate.score,
                chosen=candidate.chosen,
                reason=candidate.reason,
            )
            for candidate in response.candidates
        ),
        handle_available=response.handle_available,
        miss_reason=miss_reason_name(response.miss_reason),
        retained_tokens=response.retained_tokens,
        remaining_ttl_seconds=to_seconds(response.remaining_ttl),
        expected_pull_seconds=optional_seconds(response, "expected_pull"),
        expected_recompute_seconds=optional_seconds(response, "expected_recompute"),
        pull_tokens=response.pull_tokens,
        pull_reason=response.pull_reason,
    )
