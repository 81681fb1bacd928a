"""Why a turn leaves its conversation's decode worker. Pure values and rules."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from services.router.candidates import Candidate


class Move(Enum):
    """Why a turn goes to another decode worker than its conversation's last one."""

    BUSY = "busy"
    """The wait there would cost more than moving."""
    AVOIDED = "avoided"
    """Its breaker lets no turn through that has a choice."""
    FAILED = "failed"
    """It failed this turn's decode leg before the first chunk."""
    DRAINING = "draining"
    """It only finishes what it has."""
    GONE = "gone"
    """It is not among the model's decode workers any more."""


def why_moved(worker_id: str, candidates: Iterable[Candidate], *, failed: bool = False) -> Move:
    """Why a turn does not go to a worker when decode workers are chosen.

    Args:
        worker_id: the one that last served the conversation.
        candidates: the model's live decode workers.
        failed: whether it has failed this turn's decode leg.
    """
    candidate = next((each for each in candidates if each.worker_id == worker_id), None)
    if candidate is None:
        return Move.GONE
    if not candidate.takes_turns:
        return Move.DRAINING
    if failed:
        return Move.FAILED
    return Move.BUSY if candidate.reachable else Move.AVOIDED
