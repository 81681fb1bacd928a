"""Time that passes only when nothing else is left to do."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_SETTLE_ROUNDS = 30
"""Turns of the event loop after which everything that can go on has done so."""


class VirtualClock:
    """A clock for whole simulations: hours pass in milliseconds, always the same way."""

    def __init__(self) -> None:
        self._now = 1_000.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        """Seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Return when the time has come; with 0 seconds, after all that needs none."""
        woken = asyncio.Event()
        due = self._now + max(seconds, 0.0)
        heapq.heappush(self._sleepers, (due, next(self._order), woken))
        await woken.wait()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run something, with as much time passing as it takes."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            while not await self._settled(task):
                assert self._sleepers, "nothing is left that could happen"
                self._wake_next()
        return task.result()

    async def advance(self, seconds: float) -> None:
        """Let that much time pass."""
        end = self._now + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._wake_next()
            await self.settle()
        self._now = end

    async def sleep_for(self, seconds: float) -> None:
        """Let time pass while the engines work."""
        await self.run(self.sleep(seconds))

    async def settle(self) -> None:
        """Let everything happen that needs no time."""
        for _ in range(_SETTLE_ROUNDS):
            await asyncio.sleep(0)

    async def _settled(self, task: asyncio.Task[Any]) -> bool:
        for _ in range(_SETTLE_ROUNDS):
            if task.done():
                return True
            await asyncio.sleep(0)
        return task.done()

    def _wake_next(self) -> None:
        self._now, _, woken = heapq.heappop(self._sleepers)
        woken.set()
