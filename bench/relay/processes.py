"""The processes under measurement, and what they have consumed."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

_START_SECONDS = 60.0
_KIB = 1024


@dataclass(frozen=True)
class Fleet:
    """Everything that runs.

    Attributes:
        pids: process ids by name.
        prefill_port: of a fake prefill engine that no sidecar stands beside.
        decode_port: of such a decode engine.
        gateway_port: of the router's HTTP front.
        router_port: of its gRPC front.
        baseline_port: of the FastAPI relay.
        services_port: of kvmeta and sidecars that cost next to nothing.
        alone_port: of the HTTP front of a router over these.
    """

    pids: dict[str, int]
    prefill_port: int
    decode_port: int
    gateway_port: int
    router_port: int
    baseline_port: int
    services_port: int
    alone_port: int


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, all threads, in steps of nanoseconds."""
    spent = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                spent += int(file.read().split()[0])
        except FileNotFoundError:
            continue  # the thread has ended
    return spent / 1e9


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _KIB / _KIB


@asynccontextmanager
async def fleet(logs: Path, folder: Path) -> AsyncIterator[Fleet]:
    """Start everything; stopped at the end of the block.

    Args:
        logs: folder for logs.
        folder: for sockets and the ledger's database.

    Raises:
        TimeoutError: something did not come up; its log says why.
    """
    async with AsyncExitStack() as stack:
        pids: dict[str, int] = {}

        async def start(name: str, module: str, *args: str) -> asyncio.subprocess.Process:
            process = await stack.enter_async_context(_process(logs, name, module, args))
            pids[name] = process.pid
            return process

        async def fake(name: str, module: str, *args: str) -> int:
            process = await start(name, f"bench.relay.{module}", *args)
            assert process.stdout is not None
            return int(await process.stdout.readline())

        async def engine(name: str, role: str, events: str) -> int:
            return await fake(name, "fake_engine", role, events)

        async def router(name: str, port: int, gateway: int, kvmeta: int) -> None:
            await start(
                name,
                "services.router",
                *("--listen", f"127.0.0.1:{port}"),
                *("--gateway-listen", f"127.0.0.1:{gateway}"),
                *("--kvmeta", f"127.0.0.1:{kvmeta}"),
                "--log-json",
            )

        ports = _free_ports(8)
        kvmeta, router_port, gateway, baseline, alone_port, alone, *sidecars = ports
        await start(
            "kvmeta",
            "services.kvmeta",
            *("--listen", f"127.0.0.1:{kvmeta}"),
            *("--database-url", f"sqlite+aiosqlite:///{folder / 'ledger.db'}"),
            "--log-json",
        )
        for role, port in zip(("prefill", "decode"), sidecars, strict=True):
            events = str(folder / f"{role}.sock")
            url = f"http://127.0.0.1:{await engine(f'{role} engine', role, events)}"
            await start(
                f"{role} sidecar",
                "services.worker",
                *("--role", role),
                *("--worker-id", f"{role}-0"),
                *("--listen", f"127.0.0.1:{port}"),
                *("--kvmeta", f"127.0.0.1:{kvmeta}"),
                *("--engine-url", url),
                *("--events-socket", events),
                "--log-json",
            )
        await router("router", router_port, gateway, kvmeta)
        services = await fake("fake services", "fake_services")
        await router("router alone", alone_port, alone, services)
        prefill_port = await engine("bare prefill", "prefill", "-")
        decode_port = await engine("bare decode", "decode", "-")
        urls = [f"http://127.0.0.1:{port}" for port in (prefill_port, decode_port)]
        await start("baseline", "bench.relay.baseline", *urls, str(baseline))
        async with asyncio.timeout(_START_SECONDS):
            await _until_ready(gateway)
            await _until_ready(alone)
            await _until_open(baseline)
        yield Fleet(
            pids, prefill_port, decode_port, gateway, router_port, baseline, services, alone
        )


@asynccontextmanager
async def _process(
    logs: Path, name: str, module: str, args: Sequence[str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    log = await asyncio.to_thread(open, logs / f"{name}.log".replace(" ", "-"), "wb")
    with log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *args, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_ready(port: int) -> None:
    """Wait for the router to know workers for both legs."""
    while True:
        await asyncio.sleep(0.2)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            continue
        writer.write(b"GET /v1/models HTTP/1.0\r\nhost: bench\r\n\r\n")
        reply = await reader.read()
        writer.close()
        if b'"id"' in reply:
            return


async def _until_open(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.2)
        else:
            writer.close()
            return


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports
