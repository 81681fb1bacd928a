"""Which worker runs which leg: the policy, asked with what is known of the turn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvloop.common.v1 import common_pb2
from kvloop.errors import UnavailableError
from kvloop.kvmeta.v1 import registry_pb2
from services.router.deadline import Clock
from services.router.moves import Move, why_moved
from services.router.policy import DecodeChoice, Policy, PrefillChoice, Ranked, Rng, TurnFacts
from services.router.prompt_sizes import PromptSizes
from services.router.rendezvous import FAVOURITES, favourites
from services.router.request import TurnRequest
from services.router.workers import WorkerPool

_PREFILL, _DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE
_BEGINNING_BYTES = 4096
"""Prompts that share so much of their beginning have the same affinity."""
_SMOOTHING = 0.05
"""Weight of a new leg against the earlier ones, for what prefix caches hold."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the ledger and the request say of a turn's conversation."""

    holder_id: str
    """Worker that holds its KV, or empty."""
    held_tokens: int
    """Tokens that it holds."""
    last_id: str
    """Worker that served it last, or empty."""
    affinity: int
    """Number that turns with the same beginning share."""


class Routes:
    """Chooses workers.

    Args:
        pool: the live workers.
        policy: how to choose among them.
        clock: seconds on a clock that never goes back.
        rng: breaks ties.
    """

    def __init__(self, pool: WorkerPool, policy: Policy, *, clock: Clock, rng: Rng) -> None:
        self._pool = pool
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._sizes = PromptSizes()
        self._cached_shares: dict[str, list[float]] = {}  # by model

    def facts(
        self, request: TurnRequest, *, holder_id: str = "", held_tokens: int = 0, last_id: str = ""
    ) -> TurnFacts:
        """What is known of a turn when its workers are chosen.

        Args:
            request: what was asked for.
            holder_id: worker that holds the conversation's KV, or empty.
            held_tokens: tokens that it holds.
            last_id: worker that last served the conversation, or empty.
        """
        tokens = request.prompt_tokens or self._sizes.tokens(request.model, len(request.body_json))
        conversation = Conversation(holder_id, held_tokens, last_id, _affinity(request))
        return self.facts_of(request.model, tokens, conversation)

    def facts_of(self, model: str, prompt_tokens: int, conversation: Conversation) -> TurnFacts:
        """What is known of a turn whose prompt has about so many tokens."""
        return TurnFacts(
            prompt_tokens=max(prompt_tokens, conversation.held_tokens),
            held_tokens=conversation.held_tokens,
            holder_id=conversation.holder_id,
            last_id=conversation.last_id,
            affinity=conversation.affinity,
            favourites=favourites(self._pool.candidates(model, _PREFILL), conversation.affinity),
            cached_shares=tuple(self._cached_shares.setdefault(model, [0.0] * FAVOURITES)),
        )

    def decode(
        self, model: str, facts: TurnFacts | None = None, *, but: str = ""
    ) -> registry_pb2.Worker:
        """The worker for a decode leg.

        Args:
            model: served model name.
            facts: of the turn; none: any worker of the model will do.
            but: a worker that shall not be taken.

        Raises:
            UnavailableError: no decode worker of the model takes turns.
        """
        candidates = self._pool.candidates(model, _DECODE)
        if but:
            candidates = candidates.but((but,))
        worker = DecodeChoice(
            self._policy, candidates, facts or TurnFacts(), self._clock(), self._rng
        ).choose()
        if worker is None:
            raise UnavailableError(
                f"no decode worker takes turns for {model!r} now", reason="NO_DECODE_WORKER"
            )
        return worker

    def move(
        self, model: str, facts: TurnFacts, chosen_id: str, *, failed_id: str = ""
    ) -> Move | None:
        """Why a turn goes to another decode worker than its conversation's last one.

        Args:
            model: served model name.
            facts: of the turn.
            chosen_id: the decode worker that was chosen just now.
            failed_id: one that has failed the turn's decode leg.

        Returns:
            None if it stays there, or the conversation has had none.
        """
        if facts.home_id in ("", chosen_id):
            return None
        candidates = self._pool.candidates(model, _DECODE)
        return why_moved(facts.home_id, candidates, failed=facts.home_id == failed_id)

    def prefill(
        self,
        model: str,
        facts: TurnFacts,
        *,
        decode: registry_pb2.Worker | None,
        holder: registry_pb2.Worker | None,
        but: Iterable[str] = (),
        prefer: str = "",
    ) -> registry_pb2.Worker | None:
        """The worker for a prefill leg, or None if none can run it.

        Args:
            model: served model name.
            facts: of the turn.
            decode: worker that runs the decode leg.
            holder: worker that holds the KV to pull; None without a handle.
            but: workers that shall not be taken.
            prefer: the one to take among equals.
        """
        candidates = self._pool.candidates(model, _PREFILL)
        if barred := tuple(but):
            candidates = candidates.but(barred)
        return PrefillChoice(
            self._policy, candidates, decode, holder, facts, self._clock(), self._rng
        ).choose(prefer)

    def prefilled(
        self,
        request: TurnRequest,
        worker_id: str,
        facts: TurnFacts,
        report: common_pb2.PrefillReport,
    ) -> None:
        """Learn from a prefill leg in `WorkerPool.use` that has ended well."""
        self._sizes.learn(request.model, len(request.body_json), report.prompt_tokens)
        self.learn(request.model, worker_id, facts, report)

    def learn(
        self, model: str, worker_id: str, facts: TurnFacts, report: common_pb2.PrefillReport
    ) -> None:
        """See `prefilled`; for turns without a request."""
        self._pool.prefilled(worker_id, facts, report)
        if worker_id in facts.favourites and facts.earlier_tokens:
            found = min(report.cached_tokens / facts.earlier_tokens, 1.0)
            shares, place = self._cached_shares[model], facts.favourites.index(worker_id)
            shares[place] += _SMOOTHING * (found - shares[place])

    def rank(
        self, model: str, facts: TurnFacts, *, holder: registry_pb2.Worker | None
    ) -> tuple[Sequence[Ranked], Sequence[Ranked]]:
        """All prefill and all decode workers of the model, best first, with reasons."""
        now = self._clock()
        decode = DecodeChoice(
            self._policy, self._pool.candidates(model, _DECODE), facts, now, self._rng
        ).rank()
        prefill = PrefillChoice(
            self._policy,
            self._pool.candidates(model, _PREFILL),
            decode[0].worker if decode and decode[0].usable else None,
            holder,
            facts,
            now,
            self._rng,
        ).rank()
        return prefill, decode


def affinity_of(tenant: str, conversation_id: str) -> int:
    """The number of a conversation that has an id."""
    return _number(f"{tenant}\0{conversation_id}".encode())


def _affinity(request: TurnRequest) -> int:
    """The conversation's own number, or else that of the prompt's beginning."""
    if request.conversation_id:
        return affinity_of(request.tenant, request.conversation_id)
    start = request.prompt.start if request.prompt is not None else 0
    return _number(request.body_json[start : start + _BEGINNING_BYTES])


def _number(beginning: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(beginning, digest_size=8).digest())
