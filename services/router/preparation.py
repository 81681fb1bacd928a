"""A leg's body on its way to its worker before the leg can begin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

import structlog

from kvloop.kvmeta.v1 import registry_pb2
from services.router.deadline import Deadline
from services.router.worker_client import PreparedLeg, WorkerClient
from services.router.workers import WorkerPool

_log = structlog.get_logger(__name__)

NOT_PREPARED = "NOT_PREPARED"
"""The worker does not have the body, and did nothing."""

_MOST_UNDER_WAY = 2
"""Bodies that are under way from a router at a time. A turn that finds it busy brings its bodies
with its legs: what would be gained is nothing beside its wait, and the calls cost others time."""

Send = Callable[[WorkerClient, float], PreparedLeg | None]
"""Sends a body to a worker, with a timeout in seconds; None: it cannot."""


class Prepared(Enum):
    """What became of a body that was to go ahead."""

    USED = "used"
    """The worker had it when the leg began, or it was on its way there."""
    TOO_LATE = "too_late"
    """The leg began before it had gone."""
    DECLINED = "declined"
    """The worker did not take it, or gave it up."""
    LOST = "lost"
    """The worker turned out not to have it; counted beside its USED."""
    ELSEWHERE = "elsewhere"
    """The leg went to another worker, or to another life of this one."""


class Preparation:
    """Sends the body of one leg ahead, a moment after it was made. Made by `BodiesAhead`.

    Args:
        worker_id: the worker that was chosen.
        client: of that worker.
        send: sends the body.
        deadline: of the turn.
        pause_seconds: how long the moment is, in which what is more urgent goes; 0: none.
        landed: called once, when the body is under way no more.
    """

    def __init__(
        self,
        worker_id: str,
        client: WorkerClient,
        send: Send,
        deadline: Deadline,
        *,
        pause_seconds: float,
        landed: Callable[[], None],
    ) -> None:
        self.worker_id = worker_id
        self.spent = False
        """Whether a leg has begun that could use it."""
        self._client = client
        # Holds the turn, and the turn holds this.
        self._send_to: Send | None = send
        self._deadline = deadline
        self._landed: Callable[[], None] | None = landed
        self._call: PreparedLeg | None = None
        self._timer: asyncio.TimerHandle | None = None
        if pause_seconds:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(pause_seconds, self._send)
        else:
            self._send()

    def taken_by(self, client: WorkerClient) -> Prepared:
        """Whether the leg can do without its body now that it begins on this worker.

        Unless it is USED the body is given up.
        """
        self.spent = True
        outcome = Prepared.DECLINED
        if client is not self._client:
            outcome = Prepared.ELSEWHERE
        elif self._timer is not None:
            outcome = Prepared.TOO_LATE
        elif self._call is not None and self._call.waits():
            self._land()
            return Prepared.USED
        self.close()
        return outcome

    def close(self) -> None:
        """Give the body up if the worker still waits with it. May be called again."""
        self._land()
        self._send_to = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._call is not None:
            self._call.cancel()
            self._call = None  # which keeps the body

    def _land(self) -> None:
        landed, self._landed = self._landed, None
        if landed is not None:
            landed()

    def _send(self) -> None:
        self._timer = None
        send, self._send_to = self._send_to, None
        if send is None or self._deadline.passed:
            return
        try:
            self._call = send(self._client, self._deadline.hop_timeout())
        except Exception:
            # The leg can bring the body: nothing is worth a turn here.
            _log.exception("body_not_sent_ahead", worker_id=self.worker_id)


def has_body(
    client: WorkerClient, preparation: Preparation | None, count: Callable[[Prepared], None]
) -> bool:
    """Whether a worker has the body of a leg that begins there now. True once per turn.

    Args:
        client: the worker.
        preparation: of the leg, if its body was to go ahead.
        count: told what became of it.
    """
    if preparation is None or preparation.spent:
        return False
    outcome = preparation.taken_by(client)
    count(outcome)
    return outcome is Prepared.USED


class BodiesAhead:
    """Lets long bodies go ahead, a few at a time.

    Args:
        pool: has the workers' clients.
        least_bytes: shorter bodies do not go ahead; 0: none do.
        most: bodies under way at a time.
    """

    def __init__(self, pool: WorkerPool, *, least_bytes: int, most: int = _MOST_UNDER_WAY) -> None:
        self._pool = pool
        self._least_bytes = least_bytes
        self._most = most
        self._under_way = 0

    def takes(self, size: int) -> bool:
        """Whether a body of so many bytes may go ahead now."""
        return 0 < self._least_bytes <= size and self._under_way < self._most

    def begin(
        self,
        worker: registry_pb2.Worker,
        send: Send,
        deadline: Deadline,
        *,
        pause_seconds: float = 0.0,
    ) -> Preparation | None:
        """Let a body go; see `Preparation`. None if the worker takes none, or has left."""
        client = self._pool.client_of(worker.worker_id)
        if client is None or not worker.traits.prepared_legs:
            return None
        self._under_way += 1
        return Preparation(
            worker.worker_id,
            client,
            send,
            deadline,
            pause_seconds=pause_seconds,
            landed=self._has_landed,
        )

    def _has_landed(self) -> None:
        self._under_way -= 1
