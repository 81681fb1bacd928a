"""Keeps several processes of one service running, and ends them together."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

_log = structlog.get_logger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
_STABLE_SECONDS = 30.0
"""A process that served for so long is started anew at once."""


class Child(Protocol):
    """One life of one process."""

    @property
    def pid(self) -> int:
        """Its process id."""

    async def ready(self) -> bool:
        """Wait until it serves; False if it ended before."""

    async def ended(self) -> int:
        """Wait for its end; its exit status, negative for the signal that ended it."""

    def send_signal(self, signum: int) -> None:
        """Signal it, unless it has ended."""


class ChildFailedError(OSError):
    """A process ended before the service was up; its own output says why."""


class Supervisor:
    """Runs processes 0 to count - 1.

    A process that ends by itself is started anew: at once if it has served for a
    while, else after a pause that doubles with each short life.

    Args:
        count: how many.
        start: starts one, by its number.
        clock: seconds on a clock that never goes back.
        sleep: waits; for tests.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], Child],
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._count = count
        self._start = start
        self._clock = clock
        self._sleep = sleep
        self._serving: dict[int, Child] = {}
        self._alive: dict[int, Child] = {}
        self._stopping = False
        self._failure: ChildFailedError | None = None
        self.up = asyncio.Event()
        """Set once all have served at the same time."""

    async def run(self, stop: asyncio.Event) -> None:
        """Keep them running until `stop` is set, then end them and wait for their end.

        Raises:
            ChildFailedError: one ended before the service was up. The others are ended.
        """
        async with asyncio.TaskGroup() as tasks:
            places = [
                tasks.create_task(self._keep(number), name=f"process {number}")
                for number in range(self._count)
            ]
            stopping = tasks.create_task(stop.wait(), name="stop")
            try:
                # A place is left before only by a failure.
                await asyncio.wait([stopping, *places], return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._stopping = True
                stopping.cancel()
                for child in self._alive.values():
                    child.send_signal(signal.SIGTERM)
                for number, place in enumerate(places):
                    if number not in self._alive:
                        place.cancel()  # it pauses before the next life
        if self._failure is not None:
            raise self._failure

    def hang_up(self) -> None:
        """Tell those that serve to read their files again."""
        for child in self._serving.values():
            child.send_signal(signal.SIGHUP)

    async def _keep(self, number: int) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping:
            child = self._alive[number] = self._start(number)
            started = self._clock()
            try:
                if await child.ready():
                    self._serving[number] = child
                    if len(self._serving) == self._count:
                        self.up.set()
                status = await child.ended()
            finally:
                self._serving.pop(number, None)
                self._alive.pop(number)
            if self._stopping:
                return
            if not self.up.is_set():
                self._failure = ChildFailedError(
                    f"process {number} ended with status {status} while the service started"
                )
                return
            _log.error("process_ended", process=number, pid=child.pid, status=status)
            if self._clock() - started >= _STABLE_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            await self._sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
