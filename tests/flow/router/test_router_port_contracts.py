"""The router's ports keep their contract over gRPC as in memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing

import pytest
import pytest_asyncio

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import ConflictError, DeadlineError, NotFoundError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2
from kvloop.worker.v1 import worker_pb2
from services.router.ledger import GrpcLedger, Ledger
from services.router.worker_client import GrpcWorkerClient
from tests.flow.router.fakes import (
    eventually,
    fake_kvmeta,
    fake_worker,
    make_worker,
    serve_kvmeta,
    serve_worker,
    waits,
)
from tests.flow.router.memory_ledger import MemoryLedger, conversation
from tests.flow.router.stack import DECODE

KEY = conversation("c")
D0 = make_worker("d0", DECODE)


@pytest.fixture
def memory() -> MemoryLedger:
    return MemoryLedger()


@pytest_asyncio.fixture(params=["memory", "grpc"])
async def ledger(request, memory) -> AsyncIterator[Ledger]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            yield memory
            return
        port = await stack.enter_async_context(serve_kvmeta(*fake_kvmeta(memory)))
        channel = await stack.enter_async_context(rpc.open_channel(f"127.0.0.1:{port}"))
        yield GrpcLedger(channel)


class TestLedger:
    async def test_first_turn_has_number_one_and_no_handle(self, ledger) -> None:
        opening = await ledger.take_handle(KEY, "r1", timeout_seconds=5)
        assert (opening.turn, opening.handle) == (1, None)
        assert opening.miss_reason == common_pb2.MISS_REASON_FIRST_TURN
        assert opening.last_worker_id == ""

    async def test_handle_comes_with_its_params_verbatim(self, ledger, memory) -> None:
        params = b'{"b":[[1, 2],[]],"a":1.0,"n":null}'
        stored = memory.commit(KEY, D0, params, turn=1)
        opening = await ledger.take_handle(KEY, "r2", timeout_seconds=5)
        assert opening.handle == stored
        assert opening.handle.transfer_params_json == params
        assert opening.turn == 2
        assert opening.last_worker_id == "d0"
        assert opening.miss_reason == common_pb2.MISS_REASON_UNSPECIFIED

    async def test_handle_is_given_out_once_and_again_after_its_return(
        self, ledger, memory
    ) -> None:
        handle = memory.commit(KEY, D0, b"{}", turn=1)
        await ledger.take_handle(KEY, "r2", timeout_seconds=5)
        second = await ledger.take_handle(KEY, "r3", timeout_seconds=5)
        assert second.miss_reason == common_pb2.MISS_REASON_TAKEN
        await ledger.return_handle(KEY, handle.handle_id, "r2", timeout_seconds=5)
        third = await ledger.take_handle(KEY, "r4", timeout_seconds=5)
        assert third.handle == handle

    async def test_only_the_holder_can_return_a_handle(self, ledger, memory) -> None:
        handle = memory.commit(KEY, D0, b"{}", turn=1)
        await ledger.take_handle(KEY, "r2", timeout_seconds=5)
        with pytest.raises(ConflictError):
            await ledger.return_handle(KEY, handle.handle_id, "other", timeout_seconds=5)

    async def test_release_says_what_there_was(self, ledger, memory) -> None:
        unknown = await ledger.release(KEY, timeout_seconds=5)
        assert (unknown.found, unknown.released) == (False, False)
        memory.commit(KEY, D0, b"{}", turn=1)
        ended = await ledger.release(KEY, timeout_seconds=5)
        assert (ended.found, ended.released) == (True, True)

    async def test_reading_a_conversation(self, ledger, memory) -> None:
        with pytest.raises(NotFoundError):
            await ledger.get_conversation(KEY, timeout_seconds=5)
        memory.commit(KEY, D0, b"{}", turn=1)
        found = await ledger.get_conversation(KEY, timeout_seconds=5)
        assert found.state == ledger_pb2.Conversation.STATE_AVAILABLE
        assert found.worker_id == "d0"


async def test_ledger_that_cannot_be_reached_is_unavailable() -> None:
    async with rpc.open_channel("127.0.0.1:1") as channel:
        with pytest.raises(UnavailableError):
            await GrpcLedger(channel).take_handle(KEY, "r", timeout_seconds=5)


async def test_ledger_that_does_not_answer_in_time_is_a_deadline_error(memory) -> None:
    servicer, registry = fake_kvmeta(memory)
    servicer.gate.clear()
    async with (
        serve_kvmeta(servicer, registry) as port,
        rpc.open_channel(f"127.0.0.1:{port}") as channel,
    ):
        with pytest.raises(DeadlineError):
            await GrpcLedger(channel).take_handle(KEY, "r", timeout_seconds=0.05)


class TestGrpcWorkerClient:
    async def test_refused_connection_is_unreachable(self) -> None:
        async with rpc.open_channel("127.0.0.1:1") as channel:
            with pytest.raises(UnavailableError) as caught:
                await GrpcWorkerClient("w", channel).connect(timeout_seconds=5)
        assert caught.value.reason == "WORKER_UNREACHABLE"

    async def test_silent_host_is_unreachable_after_the_timeout(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(UnavailableError) as caught:
                    await GrpcWorkerClient("w", channel).connect(timeout_seconds=0.1)
        assert caught.value.reason == "WORKER_UNREACHABLE"

    async def test_closing_the_answer_aborts_the_engines_request(self, memory) -> None:
        fake = fake_worker(make_worker("d0", DECODE), memory)
        fake.mid_answer_steps = [waits(asyncio.Event())]
        async with (
            serve_worker(fake) as port,
            rpc.open_channel(f"127.0.0.1:{port}") as channel,
        ):
            client = GrpcWorkerClient("d0", channel)
            await client.connect(timeout_seconds=5)
            request = worker_pb2.DecodeRequest(turn_id="t")
            async with aclosing(client.decode(request, timeout_seconds=5)) as events:
                assert (await anext(events)).chunk_json == fake.chunks[0]
            await eventually(lambda: fake.cancelled == ["decode"])
