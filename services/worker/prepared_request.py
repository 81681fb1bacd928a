"""The end of a request to the engine that was begun before the leg could."""

from __future__ import annotations

from enum import StrEnum

from services.worker.engine import BegunRequest
from services.worker.metrics import WorkerMetrics


class PreparationOutcome(StrEnum):
    """What became of a body that came before its leg."""

    USED = "used"
    """The engine had it when the leg began, or got it with the leg, which had overtaken it."""
    RESENT = "resent"
    """The engine had it no more, and got all anew."""
    GIVEN_UP = "given_up"
    """The leg never began."""


async def finish(
    begun: BegunRequest | None, rest: bytes, metrics: WorkerMetrics
) -> BegunRequest | None:
    """Give the engine the rest of a body.

    Args:
        begun: what it has of it; None: nothing.
        rest: the rest.
        metrics: counts whether it had the beginning.

    Returns:
        The request, if the engine replies to it; None: it has to be sent, and whole.

    Raises:
        KvloopError: as `BegunRequest.finish`.
    """
    if begun is None:
        return None
    replies = await begun.finish(rest)
    outcome = PreparationOutcome.USED if replies else PreparationOutcome.RESENT
    metrics.preparations.labels(outcome=outcome).inc()
    return begun if replies else None
