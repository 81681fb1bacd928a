"""A router that is told to stop while it starts leaves at once, and has served nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.router import serving
from services.router.settings import RouterSettings
from tests.flow.router.fakes import eventually, fake_kvmeta, serve_kvmeta
from tests.flow.router.memory_ledger import MemoryLedger
from tests.free_ports import held_port

pytestmark = pytest.mark.timeout(90)  # interpreters start, on machines that are busy

_NOBODY = "127.0.0.1:1"
_AT_ONCE_SECONDS = 10.0
"""On a machine that is busy; the wait for the registry would last for many times that."""


async def _refuses(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


@asynccontextmanager
async def _starting(kvmeta: str, *flags: str) -> AsyncIterator[tuple[Process, list[int]]]:
    """A router process that waits for its registry, and the ports that it will open."""
    ports = [held_port(), held_port()]
    listen, gateway_listen = (f"127.0.0.1:{port}" for port in ports)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.router", "--log-json", "--kvmeta", kvmeta),
        *("--listen", listen, "--gateway-listen", gateway_listen),
        *("--registry-wait-seconds", "600", "--drain-seconds", "60", *flags),
        stderr=PIPE,
    )
    try:
        yield process, ports
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _line_with(process: Process, event: str) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        if f'"{event}"' in line.decode():
            return
    pytest.fail(f"the router ended before {event}")


@pytest.mark.parametrize("processes", [1, 2])
async def test_sigterm_ends_the_wait_for_the_registry(processes: int) -> None:
    async with _starting(_NOBODY, "--processes", str(processes)) as (process, ports):
        for _ in range(processes):
            await _line_with(process, "registry_lost")
        assert all([await _refuses(port) for port in ports])
        process.terminate()
        async with asyncio.timeout(_AT_ONCE_SECONDS):
            _, said = await process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in said.decode()
    events = [json.loads(line)["event"] for line in said.splitlines() if line.startswith(b"{")]
    assert [event for event in events if event != "registry_lost"] == [
        "router_start_given_up"
    ] * processes


async def test_no_port_is_opened_by_a_router_that_is_stopped_while_the_registry_is_silent() -> None:
    port = held_port()
    servicer, registry = fake_kvmeta(MemoryLedger(), [])
    registry.gate.clear()
    stop = asyncio.Event()
    served: list[object] = []
    opened: list[int] = []

    async def watch_the_port() -> None:
        while True:
            if not await _refuses(port):
                opened.append(port)
            await asyncio.sleep(0.002)

    async with serve_kvmeta(servicer, registry) as kvmeta, asyncio.TaskGroup() as tasks:
        settings = RouterSettings(
            listen=f"127.0.0.1:{port}",
            gateway_listen="",
            kvmeta=f"127.0.0.1:{kvmeta}",
            registry_wait_seconds=600,
            drain_seconds=1,
        )
        watching = tasks.create_task(watch_the_port())
        router = tasks.create_task(serving.serve(settings, stop, served.append))
        await eventually(lambda: registry.watched)
        stop.set()
        async with asyncio.timeout(_AT_ONCE_SECONDS):
            await router
        watching.cancel()
        registry.gate.set()
        registry.hang_up()
    assert (served, opened) == ([], [])


async def test_a_port_in_use_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.router", "--kvmeta", _NOBODY),
            *("--listen", "127.0.0.1:0", "--gateway-listen", address),
            *("--registry-wait-seconds", "0"),
            stderr=PIPE,
        )
        _, said = await process.communicate()
    assert process.returncode == 1
    assert said.decode().splitlines()[-1].startswith(f"cannot listen on {address}")
    assert "Traceback" not in said.decode()


async def test_a_file_of_keys_that_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("nobody\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.router", "--kvmeta", _NOBODY),
        *("--listen", "127.0.0.1:0", "--gateway-listen", "", "--api-keys-file", str(keys)),
        stderr=PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 1
    (line,) = said.decode().splitlines()
    assert line == "line 1 of the API keys is not 'TENANT SHA256'"
