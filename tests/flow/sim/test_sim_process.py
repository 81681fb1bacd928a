"""`python -m services.sim` as a process: flags, signals, exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvloop.stack.ports import PortPool


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else gets before the process has it."""
    with PortPool() as ports:
        yield ports.take(8900)


@asynccontextmanager
async def _process(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVLOOP_")}
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.sim",
        *flags,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def _until_healthy(port: int) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/health") as reply:
                    assert reply.status == 200
                    return
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)


async def test_it_serves_and_ends_at_sigterm_in_the_middle_of_a_stream(port: int) -> None:
    flags = (f"--port={port}", "--side-channel-port=0", "--preset=tiny-cpu", "--log-json")
    async with _process(*flags) as running:
        await _until_healthy(port)
        body = {"prompt": "hi", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with session.post(url, json=body) as reply:
                await reply.content.readany()
                running.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(running.wait(), 60) == 0


async def test_the_process_ends_when_its_only_engine_exits(port: int) -> None:
    async with _process(f"--port={port}", "--side-channel-port=0", "--fault=exit") as running:
        await _until_healthy(port)
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}/v1/completions"
            try:
                await session.post(url, json={"prompt": "hi"})
            except aiohttp.ClientError:
                pass
        assert await asyncio.wait_for(running.wait(), 60) == 1


async def test_a_taken_port_is_told_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with _process(f"--port={port}", "--side-channel-port=0") as running:
            _, errors = await running.communicate()
    assert running.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in errors.decode()
    assert "Traceback" not in errors.decode()


async def test_wrong_settings_are_told_by_flag() -> None:
    async with _process("--num-kv-blocks=5", "--preset=warp") as running:
        _, errors = await running.communicate()
    assert running.returncode == 2
    assert "--preset" in errors.decode()


async def test_help_teaches() -> None:
    async with _process("--help") as running:
        output, _ = await running.communicate()
    assert running.returncode == 0
    for word in ("--preset", "qwen3-32b-h200", "--time-scale", "--fault", "--events-socket"):
        assert word in output.decode()
