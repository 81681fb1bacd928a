"""Processes are kept running, started anew with growing pauses, and ended together."""

from __future__ import annotations

import asyncio
import errno
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
        self.hangs = False
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
        return await asyncio.shield(self._ended)

    def send_signal(self, signum: int) -> None:
        self.signals.append(signum)
        if self._ended.done():
            return
        if signum == signal.SIGKILL or (signum == signal.SIGTERM and not self.hangs):
            self.end(-signum)


class World:
    """A supervisor with fake children, a clock and pauses."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.started: list[FakeChild] = []
        self.errors: list[Exception] = []
        self.pauses: list[float] = []
        self.pausing = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.stop = asyncio.Event()
        self.supervisor = Supervisor(
            count,
            self._start,
            patience_seconds=0.05,
            clock=lambda: self.now,
            sleep=self._sleep,
            rng=lambda: 1.0,
        )

    def _start(self, number: int) -> FakeChild:
        if self.errors:
            raise self.errors.pop()
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


def _no_process() -> OSError:
    return OSError(errno.EAGAIN, "no process to be had")


async def test_one_that_cannot_be_started_at_the_start_of_the_service_ends_the_start() -> None:
    world = World(2)
    world.errors = [_no_process()]
    with pytest.raises(ChildFailedError, match=r"process 0 cannot be started: .*no process"):
        await world.supervisor.run(world.stop)
    assert all(child.signals == [signal.SIGTERM] for child in world.started)


async def test_one_that_cannot_be_started_again_is_tried_again_with_growing_pauses() -> None:
    async with supervised(2) as world:
        world.errors = [_no_process(), _no_process()]
        world.started[1].end(1)
        again = await world.starts(3)
        assert again.number == 1
        assert world.pauses == [0.1, 0.2, 0.4]
        assert world.started[0].signals == []


async def test_a_defect_ends_the_processes_too() -> None:
    world = World(2)
    running = asyncio.ensure_future(world.supervisor.run(world.stop))
    await world.starts(2)
    for child in world.started:
        child.serve()
    await world.supervisor.up.wait()
    world.errors = [ValueError("defect")]
    world.started[1].end(1)
    with pytest.raises(ExceptionGroup):
        await running
    assert world.started[0].signals == [signal.SIGTERM]


async def test_a_cancellation_ends_the_processes_too() -> None:
    world = World(2)
    running = asyncio.ensure_future(world.supervisor.run(world.stop))
    await world.starts(2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert all(child.signals == [signal.SIGTERM] for child in world.started)


async def test_one_that_does_not_end_in_time_is_killed() -> None:
    async with supervised(2) as world:
        world.started[1].hangs = True
    assert world.started[0].signals == [signal.SIGTERM]
    assert world.started[1].signals == [signal.SIGTERM, signal.SIGKILL]


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


async def test_a_hangup_during_the_start_reaches_a_process_once_it_serves() -> None:
    async with supervised(2) as world:
        world.started[0].end(1)
        starting = await world.starts(3)
        world.supervisor.hang_up()
        starting.serve()
        world.started[1].end(1)
        later = await world.starts(4)
        later.serve()
        for _ in range(10):  # the supervisor's own steps
            await asyncio.sleep(0)
        assert starting.signals == [signal.SIGHUP]
        world.supervisor.hang_up()
        assert later.signals == [signal.SIGHUP]
