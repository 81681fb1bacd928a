"""A leg's body on its way to its worker before the leg can begin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from services.router.deadline import Deadline
from services.router.worker_client import PreparedLeg, WorkerClient

NOT_PREPARED = "NOT_PREPARED"
"""The worker does not have the body, and did nothing."""

Send = Callable[[WorkerClient, float], PreparedLeg | None]
"""Sends a body to a worker, with a timeout in seconds; None: it does not take any."""


class Prepared(Enum):
    """What became of a body that was to go ahead."""

    USED = "used"
    """The worker had it when the leg began."""
    TOO_LATE = "too_late"
    """The leg began before it had gone."""
    DECLINED = "declined"
    """The worker did not take it, or gave it up."""
    LOST = "lost"
    """The worker turned out not to have it any more; counted beside its USED."""
    ELSEWHERE = "elsewhere"
    """The leg went to another worker, or to another life of this one."""


class Preparation:
    """Sends the body of one leg ahead, a moment after it was made.

    Args:
        client: the worker that was chosen.
        send: sends it.
        deadline: of the turn.
        pause_seconds: how long the moment is, in which what is more urgent goes; 0: none.
    """

    def __init__(
        self,
        client: WorkerClient,
        send: Send,
        deadline: Deadline,
        *,
        pause_seconds: float,
    ) -> None:
        self._client = client
        self._send_to = send
        self._deadline = deadline
        self._call: PreparedLeg | None = None
        self.spent = False
        """Whether a leg has begun that could use it."""
        self._timer: asyncio.TimerHandle | None = None
        if pause_seconds:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(pause_seconds, self._send)
        else:
            self._send()

    async def taken_by(self, client: WorkerClient) -> Prepared:
        """Whether the leg can do without its body now that it begins on this worker.

        Unless it is USED the body is given up.
        """
        self.spent = True
        outcome = Prepared.DECLINED
        if client is not self._client:
            outcome = Prepared.ELSEWHERE
        elif self._timer is not None:
            outcome = Prepared.TOO_LATE
        elif self._call is not None and await self._call.waits():
            return Prepared.USED
        self.close()
        return outcome

    def close(self) -> None:
        """Give the body up if the worker still waits with it. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _send(self) -> None:
        self._timer = None
        if not self._deadline.passed:
            self._call = self._send_to(self._client, self._deadline.hop_timeout())
