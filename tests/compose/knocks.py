"""Asks the front whether a turn can be served, on connections of their own, many times a second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.compose.stack import Stack

_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
_NO_REPEATS = [("grpc.enable_retries", 0)]
_HTTP_PAUSE_SECONDS = 0.02
_GRPC_PAUSE_SECONDS = 0.05
_ANSWER_SECONDS = 20.0


@dataclass
class Knocks:
    """How many were answered, over each port, and why others were not."""

    answered: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


@asynccontextmanager
async def knocks(stack: Stack, *, repeats: bool = False) -> AsyncIterator[Knocks]:
    """Knock at both ports of the front while the block runs.

    Args:
        stack: whose front.
        repeats: over gRPC, as its clients do unless told otherwise: what a server says that
            it has not seen goes to the next connection.
    """
    options = [*_OWN_CONNECTION, *(() if repeats else _NO_REPEATS)]
    found = Knocks()
    ending = asyncio.Event()

    async def over_http() -> None:
        url = f"http://127.0.0.1:{stack.http_port}/health/ready"
        async with session.get(url) as reply:
            assert reply.status == 200, f"{reply.status} {await reply.text()}"

    async def over_grpc() -> None:
        target = f"127.0.0.1:{stack.grpc_port}"
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_SECONDS)

    async def knock(port: str, ask: Callable[[], Awaitable[None]]) -> None:
        try:
            await ask()
        except Exception as error:  # whatever it is, a user would have seen it
            found.failures.append(f"{port}: {error!r}")
        else:
            found.answered[port] += 1

    async def keep_on(port: str, ask: Callable[[], Awaitable[None]], pause: float) -> None:
        async with asyncio.TaskGroup() as knocking:
            while not ending.is_set():
                knocking.create_task(knock(port, ask), name=f"knock {port}")
                await asyncio.sleep(pause)

    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS),
        ) as session,
        asyncio.TaskGroup() as ports,
    ):
        ports.create_task(keep_on("http", over_http, _HTTP_PAUSE_SECONDS), name="http")
        ports.create_task(keep_on("grpc", over_grpc, _GRPC_PAUSE_SECONDS), name="grpc")
        try:
            yield found
        finally:
            ending.set()
