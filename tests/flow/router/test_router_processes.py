"""Several router processes on one port: together they are one router."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.flow.router.fakes import (
    FakeWorker,
    fake_kvmeta,
    fake_worker,
    make_worker,
    serve_kvmeta,
    serve_worker,
    waits,
)
from tests.flow.router.memory_ledger import MODEL, MemoryLedger
from tests.flow.router.stack import DECODE, PREFILL

pytestmark = pytest.mark.timeout(90)  # interpreters start, on machines that are busy

_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, also while interpreters start on a busy machine."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@dataclass
class Routers:
    """Processes under one parent, and a worker for each leg."""

    parent: Process
    workers: dict[str, FakeWorker]
    lines: list[str] = field(default_factory=list)
    read: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all is read that they have logged."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port('gateway_port')}"

    def _port(self, name: str) -> int:
        found = next(
            re.search(rf'"{name}": ?(\d+)', line) for line in self.lines if '"processes"' in line
        )
        assert found is not None
        return int(found[1])

    async def chat(self) -> tuple[int, str]:
        """A turn on a connection of its own."""
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.url + "/v1/chat/completions", json=_CHAT) as reply,
        ):
            return reply.status, await reply.text()

    async def metrics(self) -> str:
        port = self._port("metrics_port")
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{port}/metrics") as reply,
        ):
            return await reply.text()


def _children(pid: int) -> list[int]:
    """Children that are routers, in the order of their start."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        pids = [int(word) for word in file.read().split()]
    return [child for child in pids if b"spawn_main" in _command(child)]


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


@asynccontextmanager
async def routers(*flags: str) -> AsyncIterator[Routers]:
    """Two router processes that serve and know both workers."""
    ledger = MemoryLedger()
    workers = {
        "p0": fake_worker(make_worker("p0", PREFILL), ledger),
        "d0": fake_worker(make_worker("d0", DECODE), ledger),
    }
    async with serve_worker(workers["p0"]), serve_worker(workers["d0"]):
        servicers = fake_kvmeta(ledger, [worker.worker for worker in workers.values()])
        async with serve_kvmeta(*servicers) as kvmeta:
            parent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.router", "--processes", "2", "--log-json"),
                *("--listen", "127.0.0.1:0", "--gateway-listen", "127.0.0.1:0"),
                *("--metrics-listen", "127.0.0.1:0", "--kvmeta", f"127.0.0.1:{kvmeta}"),
                *("--shutdown-grace-seconds", "20", "--ledger-timeout-seconds", "5"),
                *("--connect-timeout-seconds", "20"),
                *flags,
                stderr=PIPE,
            )
            running = Routers(parent, workers)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_read(running))
                try:
                    await until(lambda: any('"router_serving"' in line for line in running.lines))
                    await until(
                        lambda: sum('"worker_added"' in line for line in running.lines) >= 4
                    )
                    yield running
                finally:
                    if parent.returncode is None:
                        parent.terminate()
                    await parent.wait()


async def _read(running: Routers) -> None:
    assert running.parent.stderr is not None
    async for line in running.parent.stderr:
        running.lines.append(line.decode())
    running.read.set()


def _answered(metrics: str) -> dict[str, int]:
    """Answered turns by process."""
    found = re.findall(
        r'kvloop_router_turns_total\{outcome="answered",process="(\d+)"\} (\d+)', metrics
    )
    return {process: int(count) for process, count in found}


async def _answered_by_both(running: Routers) -> dict[str, int]:
    """Answered turns by process. One that is too busy to say is left out of a look."""
    async with asyncio.timeout(60):
        while sorted(answered := _answered(await running.metrics())) != ["0", "1"]:
            pass
    return answered


async def test_connections_are_spread_and_one_endpoint_tells_of_all() -> None:
    async with routers() as running:
        for _ in range(24):
            status, text = await running.chat()
            assert status == 200
            assert text.endswith("data: [DONE]\n\n")
        answered = await _answered_by_both(running)
        assert sum(answered.values()) == 24
        assert all(answered.values())


async def test_a_process_that_is_killed_comes_back_and_the_other_serves_meanwhile() -> None:
    async with routers() as running:
        killed = _children(running.parent.pid)[0]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: any('"process_ended"' in line for line in running.lines))
        assert (await running.chat())[0] == 200
        await until(lambda: sum('"worker_added"' in line for line in running.lines) >= 6)
        assert len(_children(running.parent.pid)) == 2
        assert killed not in _children(running.parent.pid)


async def test_on_sigterm_a_running_answer_is_finished_and_all_processes_end() -> None:
    async with routers() as running:
        gate = asyncio.Event()
        running.workers["d0"].mid_answer_steps = [waits(gate)]
        turn = asyncio.ensure_future(running.chat())
        await until(lambda: running.workers["d0"].decodes)
        children = _children(running.parent.pid)
        running.parent.terminate()
        await until(lambda: sum('"router_stopping"' in line for line in running.lines) == 2)
        gate.set()
        assert (await turn)[1].endswith("data: [DONE]\n\n")
        assert await running.parent.wait() == 0
        assert not any(_command(pid) for pid in children)


async def test_processes_do_not_outlive_a_parent_that_was_killed() -> None:
    async with routers() as running:
        children = _children(running.parent.pid)
        running.parent.kill()
        await running.parent.wait()
        await until(lambda: not any(_command(pid) for pid in children))


async def test_a_port_in_use_is_said_once_and_ends_the_start() -> None:
    async with routers() as running:
        address = running.url.removeprefix("http://")
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.router", "--processes", "2"),
            *("--listen", "127.0.0.1:0", "--gateway-listen", address),
            stderr=PIPE,
        )
        _, said = await second.communicate()
        assert second.returncode == 1
        assert said.decode().strip().splitlines()[-1].startswith(f"cannot listen on {address}")
        assert "Traceback" not in said.decode()


async def test_a_temporary_folder_too_long_for_sockets_is_said_and_ends_the_start(
    tmp_path: Path,
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.router", "--processes", "2"),
        *("--listen", "127.0.0.1:0", "--gateway-listen", ""),
        env={**os.environ, "TMPDIR": str(folder)},
        stderr=PIPE,
    )
    _, said = await parent.communicate()
    assert parent.returncode == 1
    (line,) = said.decode().strip().splitlines()
    assert "set TMPDIR to a shorter one" in line


async def test_a_process_that_hangs_is_killed_when_its_time_to_leave_is_over() -> None:
    async with routers("--shutdown-grace-seconds", "0") as running:
        hanging, _ = _children(running.parent.pid)
        os.kill(hanging, signal.SIGSTOP)
        running.parent.terminate()
        assert await running.parent.wait() == 0
        await running.read.wait()
        assert sum('"process_killed"' in line for line in running.lines) == 1
        assert not _command(hanging)
