"""prefix_affinity: the same prefill worker for the same beginning, within bounds of load.

A worker with much more than the mean in flight is passed over, so that one long
shared beginning does not stand in a queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.candidates import Candidate
from services.router.policies import sticking
from services.router.policy import Policy, Rng, Scores, TurnFacts, turns_in_flight
from services.router.rendezvous import draw

_ABOVE_MEAN = 1.25
_TO_ONE = 2.0**-64
"""Draws are 64-bit numbers."""


def _places(candidates: Sequence[Candidate], facts: TurnFacts) -> list[float]:
    """Places from -1 to 0, by draw, within bounds of load, and the load for the others."""
    total = sum(candidate.in_flight for candidate in candidates)
    bound = _ABOVE_MEAN * (total + 1) / len(candidates)
    affinity = facts.affinity
    return [
        _place(candidate, affinity) if candidate.in_flight < bound else candidate.in_flight
        for candidate in candidates
    ]


def _place(candidate: Candidate, affinity: int) -> float:
    return -0.5 - draw(candidate.number, affinity) * _TO_ONE


def _prefill(candidates: Sequence[Candidate], facts: TurnFacts, now: float, rng: Rng) -> Scores:
    return _places(candidates, facts)


def _prefill_reason(candidate: Candidate, facts: TurnFacts, now: float) -> str:
    place = _place(candidate, facts.affinity)
    return f"place {place:.3f} for this beginning, {turns_in_flight(candidate)}"


def _decode(candidates: Sequence[Candidate], facts: TurnFacts, now: float, rng: Rng) -> Scores:
    return sticking.kept_together(_places(candidates, facts), candidates, facts, now)


POLICY = Policy(
    name="prefix_affinity",
    prefill=_prefill,
    prefill_reason=_prefill_reason,
    decode=_decode,
    decode_reason=sticking.decode_reason,
)
