"""power_of_two: the less busy of two that are drawn; conversations stay where they are.

Where many routers see only their own turns, or see others' late, all of them would
take the same least busy worker at once. Drawing spreads them.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.candidates import Candidate
from services.router.policies import sticking
from services.router.policy import (
    LAST_RESORT,
    Policy,
    Rng,
    Scores,
    TurnFacts,
    turns_in_flight,
)


def _drawn(candidates: Sequence[Candidate], rng: Rng) -> list[float]:
    """Loads of two workers; the others are the last resort."""
    scores = [LAST_RESORT + candidate.in_flight for candidate in candidates]
    count = len(candidates)
    first = int(rng() * count)
    second = (first + 1 + int(rng() * (count - 1))) % count
    for place in {first, second}:
        scores[place] = float(candidates[place].in_flight)
    return scores


def _prefill(candidates: Sequence[Candidate], facts: TurnFacts, now: float, rng: Rng) -> Scores:
    return _drawn(candidates, rng)


def _prefill_reason(candidate: Candidate, facts: TurnFacts, now: float) -> str:
    return turns_in_flight(candidate)


def _decode(candidates: Sequence[Candidate], facts: TurnFacts, now: float, rng: Rng) -> Scores:
    return sticking.kept_together(_drawn(candidates, rng), candidates, facts, now)


POLICY = Policy(
    name="power_of_two",
    prefill=_prefill,
    prefill_reason=_prefill_reason,
    decode=_decode,
    decode_reason=sticking.decode_reason,
)
