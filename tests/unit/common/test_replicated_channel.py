"""Calls to a name of several replicas go to those that are healthy."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import grpc

from services.common.replicated_channel import open_replicated_channel
from services.common.rpc_server import Drain
from tests.free_ports import held_port
from tests.unit.common.numbered_ledgers import ask, serving


def _replica(number: int, drain: Drain) -> AbstractAsyncContextManager[int]:
    return serving(number, f"127.0.0.1:{held_port()}", drain, [])


def _name_of(*ports: int) -> str:
    """One target of several addresses, as a DNS name would give."""
    return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)


async def test_calls_go_round_the_replicas() -> None:
    async with (
        _replica(1, Drain()) as first,
        _replica(2, Drain()) as second,
        open_replicated_channel(_name_of(first, second)) as channel,
    ):
        async with asyncio.timeout(20):
            while (await ask(channel, 4)).keys() != {1, 2}:  # the second may connect later
                pass
        assert await ask(channel, 10) == {1: 5, 2: 5}


async def test_no_call_fails_while_a_replica_leaves() -> None:
    left = asyncio.Event()

    async def until_clients_have_turned(seconds: float) -> None:
        async with asyncio.timeout(20):
            while 1 in await ask(channel, 4):
                pass

    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(_replica(2, Drain()))
        async with AsyncExitStack() as leaving:
            drain = Drain(1, sleep=until_clients_have_turned)
            port = await leaving.enter_async_context(_replica(1, drain))
            channel = await stack.enter_async_context(
                open_replicated_channel(_name_of(port, other))
            )
            async with asyncio.timeout(20):
                while (await ask(channel, 4)).keys() != {1, 2}:
                    pass

            async def keep_asking() -> Counter[int]:
                seen: Counter[int] = Counter()
                while not left.is_set():
                    seen += await ask(channel, 1)
                return seen

            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(keep_asking()) for _ in range(4)]
                await leaving.aclose()
                left.set()
        answered = sum((task.result() for task in asking), Counter())
        assert answered[2] > 0
        assert await ask(channel, 4) == {2: 4}


async def test_calls_fail_at_once_when_the_only_replica_is_leaving() -> None:
    codes: list[grpc.StatusCode] = []

    async def until_a_call_has_failed(seconds: float) -> None:
        async with asyncio.timeout(20):
            while not codes:
                try:
                    await ask(channel, 1)
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code())

    drain = Drain(1, sleep=until_a_call_has_failed)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(_replica(1, drain))
        async with open_replicated_channel(_name_of(port)) as channel:
            assert await ask(channel, 2) == {1: 2}
            await stack.aclose()

    assert codes == [grpc.StatusCode.UNAVAILABLE]
