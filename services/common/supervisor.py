"""Keeps several processes of one service running, and ends them together."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from services.common.backoff import Backoff

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
        """Wait for its end; its exit status, negative for the signal that ended it.

        May be asked again after it was cancelled.
        """

    def send_signal(self, signum: int) -> None:
        """Signal it, unless it has ended."""


class ChildFailedError(OSError):
    """A process ended, or none could be started, before the service was up.

    If it ended, its own output says why.
    """


class Supervisor:
    """Runs processes 0 to count - 1.

    A process that ends by itself is started anew: at once if it has served for a
    while, else after a pause that doubles with each short life. One that cannot be
    started had the shortest of lives.

    Args:
        count: how many.
        start: starts one, by its number; may raise OSError.
        patience_seconds: how long they may take to end before they are killed.
        clock: seconds on a clock that never goes back.
        sleep: waits; for tests.
        rng: random numbers in [0, 1), so that not all are started anew at once.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], Child],
        *,
        patience_seconds: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._count = count
        self._start = start
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._sleep = sleep
        self._rng = rng
        self._serving: dict[int, Child] = {}
        self._alive: dict[int, Child] = {}
        self._hangups = 0
        self._failure: ChildFailedError | None = None
        self.up = asyncio.Event()
        """Set once all have served at the same time."""

    async def run(self, stop: asyncio.Event) -> None:
        """Keep them running until `stop` is set, then end them and wait for their end.

        They are ended too if this fails or is cancelled.

        Raises:
            ChildFailedError: one failed before the service was up. The others are ended.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                places = [
                    tasks.create_task(self._keep(number), name=f"process {number}")
                    for number in range(self._count)
                ]
                stopping = tasks.create_task(stop.wait(), name="stop")
                # A place is left before only by a failure.
                await asyncio.wait([stopping, *places], return_when=asyncio.FIRST_COMPLETED)
                for task in (stopping, *places):
                    task.cancel()
        finally:
            await self._end_all()
        if self._failure is not None:
            raise self._failure

    def hang_up(self) -> None:
        """Tell all to read their files again; those that do not serve yet, once they do."""
        self._hangups += 1
        for child in self._serving.values():
            child.send_signal(signal.SIGHUP)

    async def _keep(self, number: int) -> None:
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, rng=self._rng)
        while True:
            started = self._clock()
            try:
                child = self._start(number)
            except OSError as error:
                if self._failed(f"process {number} cannot be started: {error}"):
                    return
                _log.error("process_not_started", process=number, error=str(error))
            else:
                status = await self._life(number, child)
                if self._failed(
                    f"process {number} ended with status {status} while the service started"
                ):
                    return
                _log.error("process_ended", process=number, pid=child.pid, status=status)
            if self._clock() - started >= _STABLE_SECONDS:
                backoff.reset()
            await self._sleep(backoff.next_seconds())

    async def _life(self, number: int, child: Child) -> int:
        """Follow a process to its end; its exit status."""
        self._alive[number] = child
        hangups = self._hangups
        try:
            if await child.ready():
                self._serving[number] = child
                if self._hangups != hangups:  # it may have read its files before
                    child.send_signal(signal.SIGHUP)
                if len(self._serving) == self._count:
                    self.up.set()
            status = await child.ended()
        finally:
            self._serving.pop(number, None)
        del self._alive[number]  # not if cancelled: then it has yet to be ended
        return status

    def _failed(self, what: str) -> bool:
        """Note a failure if the service is not up yet, which ends it."""
        if not self.up.is_set():
            self._failure = ChildFailedError(what)
        return self._failure is not None

    async def _end_all(self) -> None:
        for child in self._alive.values():
            child.send_signal(signal.SIGTERM)
        async with asyncio.TaskGroup() as tasks:
            for number, child in self._alive.items():
                tasks.create_task(self._end(number, child), name=f"end of process {number}")

    async def _end(self, number: int, child: Child) -> None:
        try:
            async with asyncio.timeout(self._patience_seconds):
                await child.ended()
        except TimeoutError:
            _log.error("process_killed", process=number, pid=child.pid)
            child.send_signal(signal.SIGKILL)
            await child.ended()
