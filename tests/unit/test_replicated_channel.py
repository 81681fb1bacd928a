"""Calls to a name of several replicas go to those that are healthy."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop import rpc
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.common.rpc_server import Drain, serve


class _Ledger(ledger_pb2_grpc.LedgerServiceServicer):
    """Says in each answer which replica it is."""

    def __init__(self, number: int) -> None:
        self._number = number

    async def TakeHandle(self, request, context):
        return ledger_pb2.TakeHandleResponse(turn=self._number)


@asynccontextmanager
async def _replica(
    number: int,
    drain: Drain,
    *,
    address: str = "127.0.0.1:0",
    max_connection_age_seconds: float | None = None,
) -> AsyncIterator[int]:
    servicer = _Ledger(number)  # type: ignore[abstract]
    async with serve(
        address,
        lambda server: ledger_pb2_grpc.add_LedgerServiceServicer_to_server(servicer, server),
        [],
        grace_seconds=5,
        drain=drain,
        max_connection_age_seconds=max_connection_age_seconds,
    ) as port:
        yield port


class _Names(asyncio.DatagramProtocol):
    """A name server that gives every name the same IPv4 addresses, and no others."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        name_end = data.index(0, 12) + 1
        question = data[12 : name_end + 4]
        asks_for_ipv4 = question[-4:-2] == b"\0\1"
        answers = [
            # The name above, type A, class IN, a second to live, four bytes.
            b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton(address)
            for address in (self.addresses if asks_for_ipv4 else ())
        ]
        counts = b"\0\1" + len(answers).to_bytes(2, "big") + b"\0\0\0\0"
        self._transport.sendto(data[:2] + b"\x81\x80" + counts + question + b"".join(answers), addr)


def _name_of(*ports: int) -> str:
    """One target of several addresses, as a DNS name would give."""
    return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)


async def _ask(stub: Any, times: int, of_bytes: int = 0) -> Counter[int]:
    request = ledger_pb2.TakeHandleRequest(request_id="x" * of_bytes)
    return Counter([(await stub.TakeHandle(request)).turn for _ in range(times)])


async def test_calls_go_round_the_replicas() -> None:
    async with (
        _replica(1, Drain()) as first,
        _replica(2, Drain()) as second,
        rpc.open_channel(_name_of(first, second), replicated=True) as channel,
    ):
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        async with asyncio.timeout(20):
            while (await _ask(stub, 4)).keys() != {1, 2}:  # the second may connect later
                pass
        assert await _ask(stub, 10) == {1: 5, 2: 5}


async def test_no_call_fails_while_a_replica_leaves() -> None:
    left = asyncio.Event()

    async def until_clients_have_turned(seconds: float) -> None:
        async with asyncio.timeout(20):
            while 1 in await _ask(stub, 4):
                pass

    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(_replica(2, Drain()))
        async with AsyncExitStack() as leaving:
            drain = Drain(1, sleep=until_clients_have_turned)
            port = await leaving.enter_async_context(_replica(1, drain))
            channel = await stack.enter_async_context(
                rpc.open_channel(_name_of(port, other), replicated=True)
            )
            stub = ledger_pb2_grpc.LedgerServiceStub(channel)
            async with asyncio.timeout(20):
                while (await _ask(stub, 4)).keys() != {1, 2}:
                    pass

            async def keep_asking() -> Counter[int]:
                seen: Counter[int] = Counter()
                while not left.is_set():
                    seen += await _ask(stub, 1)
                return seen

            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(keep_asking()) for _ in range(4)]
                await leaving.aclose()
                left.set()
        answered = sum((task.result() for task in asking), Counter())
        assert answered[2] > 0
        assert await _ask(stub, 4) == {2: 4}


async def test_calls_fail_at_once_when_the_only_replica_is_leaving() -> None:
    codes: list[grpc.StatusCode] = []

    async def until_a_call_has_failed(seconds: float) -> None:
        async with asyncio.timeout(20):
            while not codes:
                try:
                    await _ask(stub, 1)
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code())

    drain = Drain(1, sleep=until_a_call_has_failed)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(_replica(1, drain))
        async with rpc.open_channel(_name_of(port), replicated=True) as channel:
            stub = ledger_pb2_grpc.LedgerServiceStub(channel)
            assert await _ask(stub, 2) == {1: 2}
            await stack.aclose()

    assert codes == [grpc.StatusCode.UNAVAILABLE]


async def test_a_replica_that_comes_later_is_found_and_calls_go_on_meanwhile() -> None:
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(
        lambda: _Names("127.0.0.1"), local_addr=("127.0.0.1", 0)
    )
    async with AsyncExitStack() as stack:
        stack.callback(transport.close)
        port = await stack.enter_async_context(_replica(1, Drain(), max_connection_age_seconds=1))
        name_server = "127.0.0.1:{}".format(transport.get_extra_info("sockname")[1])
        channel = await stack.enter_async_context(
            rpc.open_channel(f"dns://{name_server}/kvmeta.test:{port}", replicated=True)
        )
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await _ask(stub, 4) == {1: 4}

        await stack.enter_async_context(_replica(2, Drain(), address=f"127.0.0.2:{port}"))
        names.addresses = ("127.0.0.1", "127.0.0.2")
        async with asyncio.timeout(20):
            while (await _ask(stub, 4)).keys() != {1, 2}:
                pass
        assert not watch.done()
        watch.cancel()


@pytest.mark.parametrize(("of_bytes", "times"), [(0, 120), (400_000, 30)])
async def test_no_call_fails_on_a_connection_that_ends_of_age(of_bytes: int, times: int) -> None:
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(
                _replica(number, Drain(), max_connection_age_seconds=0.05)
            )
            for number in (1, 2)
        ]
        clients = [
            await stack.enter_async_context(rpc.open_channel(_name_of(*replicas), replicated=True))
            for _ in range(4)
        ]
        stubs = [ledger_pb2_grpc.LedgerServiceStub(channel) for channel in clients]
        async with asyncio.TaskGroup() as tasks:
            for stub in stubs:
                for _ in range(16):
                    tasks.create_task(_ask(stub, times, of_bytes))
