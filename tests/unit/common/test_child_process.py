"""A child tells its parent that it serves, and does not outlive it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from services.common.child_process import ParentLink, SpawnedChild

pytestmark = pytest.mark.timeout(90)  # interpreters start, on machines that are busy

_PARENT = """
import asyncio
from services.common.child_process import SpawnedChild
from tests.unit.common.test_child_process import {main}

async def main():
    child = SpawnedChild({main}, None, 0)
    assert await child.ready()
    print(child.pid, flush=True)
    await child.ended()

asyncio.run(main())
"""


class CountingStop(asyncio.Event):
    """Counts how often it was set."""

    times = 0

    def set(self) -> None:
        self.times += 1
        super().set()


def never_listens(link: ParentLink, _: None) -> None:
    """A child that has not come to listen on the pipe."""
    link.serving()
    signal.pause()


def hangs_later(link: ParentLink, _: None) -> None:
    """A child that hangs once it shall leave."""
    _hang(link, listens=True)


def hangs_before(link: ParentLink, _: None) -> None:
    """A child that hangs while it serves."""
    _hang(link, listens=False)


def _hang(link: ParentLink, *, listens: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def serve() -> None:
        stop = asyncio.Event()
        with link.stop_when_alone(stop, 0.1):
            link.serving()
            if listens:
                await stop.wait()
            time.sleep(600)  # noqa: ASYNC251, it hangs

    asyncio.run(serve())


def _runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize("main", ["never_listens", "hangs_later", "hangs_before"])
async def test_a_child_does_not_outlive_its_parent(main: str) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PARENT.format(main=main), stdout=PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    try:
        assert _runs(child)
        parent.kill()
        async with asyncio.timeout(30):
            while _runs(child):  # noqa: ASYNC110, it is not ours
                await asyncio.sleep(0.01)
    finally:
        if _runs(child):
            os.kill(child, signal.SIGKILL)
        await parent.communicate()  # until nobody holds its output any more


async def test_the_end_of_the_parent_is_seen_once() -> None:
    ours, theirs = multiprocessing.Pipe()
    stop = CountingStop()
    with theirs, ParentLink(theirs).stop_when_alone(stop, 60):
        ours.close()
        await stop.wait()
        for _ in range(10):  # rounds of the loop, while it drains
            await asyncio.sleep(0)
    assert stop.times == 1


async def test_a_child_that_cannot_be_started_leaves_no_open_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no process to be had")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess._Popen", staticmethod(fail))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no process") as failure:
        SpawnedChild(never_listens, None, 0)
    assert failure.tb is not None  # so its frames are alive, and nothing is closed by chance
    assert os.listdir("/proc/self/fd") == before
