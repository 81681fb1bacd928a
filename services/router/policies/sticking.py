"""When a conversation stays with its decode worker. Pure functions.

The worker that holds a conversation's KV has to read only what is new from
prefill; another reads everything. Staying pays unless the wait there is longer than
that. A conversation that leaves costs no reuse: its KV is pulled from the old
worker once, by prefill, and freed there.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.candidates import Candidate
from services.router.policy import LAST_RESORT, Scores, TurnFacts, turns_in_flight

MARGIN_SECONDS = 0.02
"""A conversation does not move for less."""
_HOLDER, _LAST = -2.0, -1.0


def is_overloaded(candidate: Candidate, facts: TurnFacts, now: float) -> bool:
    """Whether waiting there takes longer than moving the conversation away."""
    wait = candidate.load.wait(candidate.in_flight, now)
    moving = candidate.load.speeds.hand_over_token * facts.tokens_at(candidate.worker_id)
    return wait > moving + MARGIN_SECONDS


def kept_together(
    scores: list[float], candidates: Sequence[Candidate], facts: TurnFacts, now: float
) -> Scores:
    """Scores in which the conversation's own worker comes first, if it has time, or
    else last."""
    bonds = [(facts.last_id, _LAST)] if facts.last_id != facts.holder_id else []
    for worker_id, score in (*bonds, (facts.holder_id, _HOLDER)):
        if worker_id:
            for place, candidate in enumerate(candidates):
                if candidate.worker_id == worker_id:
                    if is_overloaded(candidate, facts, now):
                        scores[place] += LAST_RESORT
                    else:
                        scores[place] = score
                    break
    return scores


def decode_reason(candidate: Candidate, facts: TurnFacts, now: float) -> str:
    """Why a worker comes first or does not, in words."""
    load = turns_in_flight(candidate)
    if candidate.worker_id == facts.holder_id:
        bond = "holds the conversation's KV"
    elif candidate.worker_id == facts.last_id:
        bond = "served the conversation last"
    else:
        return load
    if not is_overloaded(candidate, facts, now):
        return bond
    wait = candidate.load.wait(candidate.in_flight, now)
    return f"{bond}, but a turn would wait {wait * 1e3:,.0f} ms there; {load}"
