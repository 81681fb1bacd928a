"""Who runs which leg: pure functions from facts to a choice, or to a ranking with reasons.

A policy is a name and two ways to score workers. What holds for all of them is
here: who may be used at all, and that equals are chosen among at random. The
pipeline chooses, which writes no reasons and sorts nothing; ExplainRoute ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvloop.compatibility import hand_over_obstacle, pull_obstacle
from kvloop.kvmeta.v1 import registry_pb2
from services.router.breaker import BreakerState
from services.router.candidates import Candidate, Roster

Rng = Callable[[], float]
"""Random numbers in [0, 1), to break ties. A fixed order would send every turn
of an idle fleet to the same worker."""

LAST_RESORT = 1_000_000.0
"""Added to the score of workers that are used only if there is no other."""
LAST_SHARE = 0.8
"""Share of a prompt that is taken to be known from earlier turns where only that
there were some is known: nobody holds it any more, but caches may."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnFacts:
    """What is known of a turn when its workers are chosen."""

    prompt_tokens: int = 0
    """Tokens of its prompt, estimated; 0 if nothing is known."""
    held_tokens: int = 0
    """Tokens that the holder retains for it; 0 without a handle."""
    holder_id: str = ""
    """Worker that holds the conversation's KV, or empty."""
    last_id: str = ""
    """Worker that last served the conversation, or empty."""
    affinity: int = 0
    """Number that turns with the same beginning share."""
    favourites: tuple[str, ...] = ()
    """Prefill worker that this beginning belongs to, and who stands in for it."""
    cached_shares: tuple[float, ...] = ()
    """Share of a conversation's earlier turns that each of these was found to have in
    its prefix cache, over all conversations."""

    @property
    def home_id(self) -> str:
        """Decode worker that the conversation stays with if it can, or empty."""
        return self.holder_id or self.last_id

    @property
    def pullable(self) -> int:
        """Tokens of the prompt that a prefill worker can pull."""
        return min(self.held_tokens, self.prompt_tokens)

    @property
    def earlier_tokens(self) -> int:
        """Tokens of the prompt that were part of earlier turns, as far as is known."""
        if self.holder_id or not self.last_id:
            return self.pullable
        return int(self.prompt_tokens * LAST_SHARE)

    def without_handle(self) -> TurnFacts:
        """The same turn for a prefill worker that cannot pull what the holder retains, or
        once nobody can. The holder has still served the conversation last."""
        if not self.holder_id:
            return self
        return replace(self, held_tokens=0, holder_id="", last_id=self.last_id or self.holder_id)

    def cached_at(self, prefill_worker_id: str) -> int:
        """Tokens of the prompt that a prefill worker is likely to have cached."""
        if prefill_worker_id not in self.favourites:
            return 0
        share = self.cached_shares[self.favourites.index(prefill_worker_id)]
        return int(self.earlier_tokens * share)

    def tokens_at(self, decode_worker_id: str) -> int:
        """Tokens of the prompt that a decode worker has already."""
        if decode_worker_id == self.holder_id:
            return self.pullable
        if decode_worker_id == self.last_id:
            return int(self.prompt_tokens * LAST_SHARE)
        return 0


Scores = Sequence[float]
Scorer = Callable[[Sequence[Candidate], TurnFacts, float, Rng], Scores]
"""Scores of usable workers, lower is better, from (workers, facts, time, rng)."""
Reason = Callable[[Candidate, TurnFacts, float], str]
"""Why a worker has its score, in words, from (worker, facts, time)."""


@dataclass(frozen=True)
class Policy:
    """A way to choose workers."""

    name: str
    prefill: Scorer
    prefill_reason: Reason
    decode: Scorer
    decode_reason: Reason
    weighs_pulls: bool = False
    """Whether a prefill worker's score says what it costs not to pull. If not, one
    that cannot pull is used only where there is no other."""


@dataclass(frozen=True)
class Ranked:
    """One candidate with its place in the ranking."""

    candidate: Candidate
    """Who."""
    score: float
    """Lower is better; infinite if it must not be used."""
    reason: str
    """Why this score, in words."""

    @property
    def usable(self) -> bool:
        """Whether the leg may go there at all."""
        return math.isfinite(self.score)

    @property
    def worker(self) -> registry_pb2.Worker:
        """The candidate's worker."""
        return self.candidate.worker


@dataclass(frozen=True)
class PrefillChoice:
    """Choice of a prefill worker.

    Any of them can pull the conversation's KV. One that is not reachable is not
    usable: the prefill leg can be left out, so nothing is gained by waiting for it.
    """

    policy: Policy
    candidates: Roster
    """Live prefill workers."""
    decode: registry_pb2.Worker | None
    """Worker that will run the decode leg, if one was found."""
    holder: registry_pb2.Worker | None
    """Worker that holds the KV to pull, or None without a handle."""
    facts: TurnFacts
    """Of the turn. What they say of a handle counts for workers that can pull with it."""
    now: float
    rng: Rng

    def choose(self, prefer: str = "") -> registry_pb2.Worker | None:
        """The worker to use, or None; among equals the one that is preferred."""
        pulling, others = self._usable()
        scores = self._scores(pulling, others)
        chosen = _least([*pulling, *others] if others else pulling, scores, self.rng, prefer)
        return chosen.worker if chosen is not None else None

    def rank(self) -> list[Ranked]:
        """All candidates, best first."""
        pulling, others = self._usable()
        scores = self._scores(pulling, others)
        ranking = [
            Ranked(candidate, score, self._reason(candidate))
            for candidate, score in zip([*pulling, *others], scores, strict=True)
        ]
        usable = {id(entry.candidate) for entry in ranking}
        barred = [
            Ranked(candidate, math.inf, self._bar(candidate) or "")
            for candidate in self.candidates
            if id(candidate) not in usable
        ]
        return _sorted(ranking, self.rng) + barred

    def _usable(self) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
        """Those that can be used: who can pull what is held, and the others."""
        usable = self.candidates.usable
        verdicts = {kind: self._verdict(one) for kind, one in self.candidates.kinds.items()}
        if all(verdict == (True, True) for verdict in verdicts.values()):
            return usable, ()
        return (
            [candidate for candidate in usable if verdicts[candidate.kind] == (True, True)],
            [candidate for candidate in usable if verdicts[candidate.kind] == (True, False)],
        )

    def _verdict(self, worker: registry_pb2.Worker) -> tuple[bool, bool]:
        decode, holder = self.decode, self.holder
        hands_over = decode is None or hand_over_obstacle(worker, decode) is None
        return hands_over, holder is None or pull_obstacle(worker, holder) is None

    def _scores(self, pulling: Sequence[Candidate], others: Sequence[Candidate]) -> Scores:
        facts = self._facts(pulls=self.holder is not None)
        scores = self.policy.prefill(pulling, facts, self.now, self.rng) if pulling else ()
        if not others:
            return scores
        more = self.policy.prefill(others, self._facts(pulls=False), self.now, self.rng)
        penalty = 0.0 if self.policy.weighs_pulls else LAST_RESORT
        return [*scores, *(score + penalty for score in more)]

    def _bar(self, candidate: Candidate) -> str | None:
        if not candidate.takes_turns:
            return "draining"
        if not candidate.reachable:
            return _breaker_words(candidate)
        if self.decode is not None:
            obstacle = hand_over_obstacle(candidate.worker, self.decode)
            if obstacle is not None:
                return f"cannot hand over to {self.decode.worker_id}: {obstacle.value}"
        return None

    def _reason(self, candidate: Candidate) -> str:
        words, pulls = "", self.holder is not None
        if self.holder is not None:
            obstacle = pull_obstacle(candidate.worker, self.holder)
            if obstacle is not None:
                words = f"cannot pull from {self.holder.worker_id}: {obstacle.value}; "
                pulls = False
        facts = self._facts(pulls=pulls)
        return words + self.policy.prefill_reason(candidate, facts, self.now) + _trial(candidate)

    def _facts(self, *, pulls: bool) -> TurnFacts:
        return self.facts if pulls else self.facts.without_handle()


@dataclass(frozen=True)
class DecodeChoice:
    """Choice of a decode worker.

    Health beats affinity: a worker that is not reachable comes last, even if it
    holds the conversation. It stays usable, because the decode leg cannot be left
    out.
    """

    policy: Policy
    candidates: Roster
    """Live decode workers."""
    facts: TurnFacts
    now: float
    rng: Rng

    def choose(self) -> registry_pb2.Worker | None:
        """The worker to use, or None."""
        usable: Sequence[Candidate] = self.candidates.usable
        if usable:
            scores = self.policy.decode(usable, self.facts, self.now, self.rng)
        else:
            usable = [c for c in self.candidates if c.takes_turns]
            scores = _last_resort(usable)
        chosen = _least(usable, scores, self.rng)
        return chosen.worker if chosen is not None else None

    def rank(self) -> list[Ranked]:
        """All candidates, best first."""
        usable = self.candidates.usable
        scores = self.policy.decode(usable, self.facts, self.now, self.rng) if usable else ()
        ranking = [
            Ranked(candidate, score, self._reason(candidate))
            for candidate, score in zip(usable, scores, strict=True)
        ]
        cut_off = [c for c in self.candidates if c.takes_turns and not c.reachable]
        last = [
            Ranked(candidate, score, _breaker_words(candidate))
            for candidate, score in zip(cut_off, _last_resort(cut_off), strict=True)
        ]
        barred = [Ranked(c, math.inf, "draining") for c in self.candidates if not c.takes_turns]
        return _sorted(ranking, self.rng) + _sorted(last, self.rng) + barred

    def _reason(self, candidate: Candidate) -> str:
        return self.policy.decode_reason(candidate, self.facts, self.now) + _trial(candidate)


def first_usable(ranking: Sequence[Ranked]) -> registry_pb2.Worker | None:
    """The worker to use, or None."""
    return ranking[0].worker if ranking and ranking[0].usable else None


def turns_in_flight(candidate: Candidate) -> str:
    """How busy a worker is, in words."""
    return f"{candidate.in_flight} turns in flight"


def _least(
    candidates: Sequence[Candidate], scores: Scores, rng: Rng, prefer: str = ""
) -> Candidate | None:
    if not candidates:
        return None
    best = min(scores)
    ties = [place for place, score in enumerate(scores) if score == best]
    if prefer and len(ties) > 1:
        for place in ties:
            if candidates[place].worker_id == prefer:
                return candidates[place]
    return candidates[ties[int(rng() * len(ties))] if len(ties) > 1 else ties[0]]


def _sorted(ranking: list[Ranked], rng: Rng) -> list[Ranked]:
    return sorted(ranking, key=lambda entry: (entry.score, rng()))


def _last_resort(candidates: Sequence[Candidate]) -> list[float]:
    return [LAST_RESORT + candidate.in_flight for candidate in candidates]


def _breaker_words(candidate: Candidate) -> str:
    if candidate.breaker is BreakerState.HALF_OPEN:
        return "failed a moment ago; one turn is trying it again"
    return "could not be reached, or failed, a moment ago"


def _trial(candidate: Candidate) -> str:
    return "; the next turn tries it again" if candidate.breaker is BreakerState.HALF_OPEN else ""
