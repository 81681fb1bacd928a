"""least_loaded: the fewest turns in flight; conversations stay where they are."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.candidates import Candidate
from services.router.policies import sticking
from services.router.policy import Policy, Rng, Scores, TurnFacts, turns_in_flight


def _prefill(candidates: Sequence[Candidate], facts: TurnFacts, now: float, rng: Rng) -> Scores:
    return [candidate.in_flight for candidate in candidates]


def _prefill_reason(candidate: Candidate, facts: TurnFacts, now: float) -> str:
    return turns_in_flight(candidate)


def _decode(candidates: Sequence[Candidate], facts: TurnFacts, now: float, rng: Rng) -> Scores:
    scores = [float(candidate.in_flight) for candidate in candidates]
    return sticking.kept_together(scores, candidates, facts, now)


POLICY = Policy(
    name="least_loaded",
    prefill=_prefill,
    prefill_reason=_prefill_reason,
    decode=_decode,
    decode_reason=sticking.decode_reason,
)
