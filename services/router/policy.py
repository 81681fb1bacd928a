"""Who runs which leg: pure functions from facts to a ranking with reasons.

The turn pipeline takes the first usable entry; ExplainRoute shows them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvloop.compatibility import hand_over_obstacle, pull_obstacle
from kvloop.kvmeta.v1 import registry_pb2

Rng = Callable[[], float]
"""Random numbers in [0, 1), to break ties. A fixed order would send every turn
of an idle fleet to the same worker."""

_COOLING = 1_000.0
_CANNOT_PULL = 1_000.0


@dataclass(frozen=True)
class Candidate:
    """One live worker and what this router knows of it now."""

    worker: registry_pb2.Worker
    """As registered."""
    in_flight: int = 0
    """Turns that this router has in flight there."""
    reachable: bool = True
    """False for a while after a connection to it has failed."""

    @property
    def worker_id(self) -> str:
        """Name of the worker."""
        return self.worker.worker_id

    @property
    def takes_turns(self) -> bool:
        """False while it only finishes what it has."""
        return self.worker.state != registry_pb2.Worker.STATE_DRAINING


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


def rank_prefill(
    candidates: Iterable[Candidate],
    *,
    decode: registry_pb2.Worker | None,
    holder: registry_pb2.Worker | None,
    rng: Rng,
) -> list[Ranked]:
    """Prefill workers, best first: by least load, ties at random.

    Any of them can pull the conversation's KV, so there is no affinity. A worker
    that was unreachable a moment ago is not usable: the prefill leg can be left
    out, so nothing is gained by waiting for it.

    Args:
        candidates: live prefill workers.
        decode: worker that will run the decode leg, if one was found.
        holder: worker that holds the KV to pull, or None without a handle.
        rng: breaks ties.
    """

    def score(candidate: Candidate) -> tuple[float, str]:
        if not candidate.takes_turns:
            return math.inf, "draining"
        if not candidate.reachable:
            return math.inf, "could not be reached a moment ago"
        if decode is not None and (obstacle := hand_over_obstacle(candidate.worker, decode)):
            return math.inf, f"cannot hand over to {decode.worker_id}: {obstacle.value}"
        load = _load(candidate)
        if holder is not None and (obstacle := pull_obstacle(candidate.worker, holder)):
            return (
                candidate.in_flight + _CANNOT_PULL,
                f"cannot pull from {holder.worker_id}: {obstacle.value}; {load}",
            )
        return candidate.in_flight, load

    return _ranked(candidates, score, rng)


def rank_decode(
    candidates: Iterable[Candidate], *, holder_id: str, last_id: str, rng: Rng
) -> list[Ranked]:
    """Decode workers, best first: by conversation, then by least load, ties at random.

    Health beats affinity: a worker that was unreachable a moment ago comes last,
    even if it holds the conversation. It stays usable, because the decode leg
    cannot be left out.

    Args:
        candidates: live decode workers.
        holder_id: worker that holds the conversation's KV, or empty.
        last_id: worker that last served the conversation, or empty.
        rng: breaks ties.
    """

    def score(candidate: Candidate) -> tuple[float, str]:
        if not candidate.takes_turns:
            return math.inf, "draining"
        if not candidate.reachable:
            return candidate.in_flight + _COOLING, "could not be reached a moment ago"
        if candidate.worker_id == holder_id:
            return 0.0, "holds the conversation's KV"
        if candidate.worker_id == last_id:
            return 0.5, "served the conversation last"
        return 1.0 + candidate.in_flight, _load(candidate)

    return _ranked(candidates, score, rng)


def first_usable(ranking: Sequence[Ranked]) -> registry_pb2.Worker | None:
    """The worker to use, or None."""
    return ranking[0].worker if ranking and ranking[0].usable else None


def _ranked(
    candidates: Iterable[Candidate], score: Callable[[Candidate], tuple[float, str]], rng: Rng
) -> list[Ranked]:
    ranking = [Ranked(candidate, *score(candidate)) for candidate in candidates]
    return sorted(ranking, key=lambda entry: (entry.score, rng()))


def _load(candidate: Candidate) -> str:
    return f"{candidate.in_flight} turns in flight"
