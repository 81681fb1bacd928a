"""Processes are kept running, started anew with growing pauses, and ended together."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.supervisor import ChildFailedError, Supervisor


class FakeChild:
    """A process that does what the test says."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 1000 + number
        self.signals: list[int] = []
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def serve(self) -> None:
        self._ready.set_result(True)

    def end(self, status: int) -> None:
        if not self._ready.done():
            self._ready.set_result(False)
        self._ended.set_result(status)

    async def ready(self) -> bool:
        return await self._ready

    async def ended(self) -> int:
        return await self._ended

    def send_signal(self, signum: int) -> None:
        self.signals.append(signum)
        if signum == signal.SIGTERM and not self._ended.done():
            self.end(0)


class World:
    """A supervisor with fake children, a clock and pauses."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.started: list[FakeChild] = []
        self.pauses: list[float] = []
        self.pausing = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.stop = asyncio.Event()
        self.supervisor = Supervisor(count, self._start, clock=lambda: self.now, sleep=self._sleep)

    def _start(self, number: int) -> FakeChild:
        self.started.append(FakeChild(number))
        return self.started[-1]

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.pausing.set()
        await self.go_on.wait()

    async def starts(self, count: int) -> FakeChild:
        """Wait until so many have been started in all; the last of them."""
        while len(self.started) < count:  # noqa: ASYNC110, the supervisor's own steps
            await asyncio.sleep(0)
        return self.started[-1]


@asynccontextmanager
async def supervised(count: int) -> AsyncIterator[World]:
    """All serve."""
    world = World(count)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.supervisor.run(world.stop))
        await world.starts(count)
        for child in world.started:
            child.serve()
        await world.supervisor.up.wait()
        yield world
        world.stop.set()


async def test_it_is_up_when_all_serve_and_ends_all_with_sigterm() -> None:
    async with supervised(3) as world:
        assert [child.number for child in world.started] == [0, 1, 2]
        assert not any(child.signals for child in world.started)
    assert all(child.signals == [signal.SIGTERM] for child in world.started)


async def test_one_that_ends_by_itself_is_started_anew_in_its_place() -> None:
    async with supervised(2) as world:
        world.started[1].end(-signal.SIGKILL)
        again = await world.starts(3)
        again.serve()
    assert again.number == 1
    assert again.signals == [signal.SIGTERM]
    assert world.started[1].signals == []


async def test_the_pause_doubles_with_each_short_life_and_is_short_again_after_a_long_one() -> None:
    async with supervised(1) as world:
        for lives in range(1, 10):
            world.started[-1].end(1)
            (await world.starts(lives + 1)).serve()
        assert world.pauses[:4] == [0.1, 0.2, 0.4, 0.8]
        assert max(world.pauses) == 10.0
        world.now += 60.0
        world.started[-1].end(1)
        await world.starts(11)
        assert world.pauses[-1] == 0.1


async def test_one_that_fails_at_the_start_of_the_service_ends_the_others() -> None:
    world = World(2)

    async def fail() -> None:
        await world.starts(2)
        world.started[0].serve()
        world.started[1].end(3)

    with pytest.raises(ChildFailedError, match="process 1 ended with status 3"):
        await asyncio.gather(world.supervisor.run(world.stop), fail())
    assert world.started[0].signals == [signal.SIGTERM]
    assert len(world.started) == 2


async def test_stopping_does_not_wait_for_the_pause_before_the_next_life() -> None:
    async with supervised(1) as world:
        world.go_on.clear()
        world.started[0].end(1)
        await world.pausing.wait()
    assert len(world.started) == 1


async def test_a_hangup_reaches_those_that_serve_and_no_others() -> None:
    async with supervised(2) as world:
        world.started[0].end(1)
        starting = await world.starts(3)
        world.supervisor.hang_up()
        assert world.started[1].signals == [signal.SIGHUP]
        assert starting.signals == []
