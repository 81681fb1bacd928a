"""The ledger or the registry is down, slow or restarted."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import UnavailableError
from kvloop.router.v1 import router_pb2, router_pb2_grpc
from services.router import app
from services.router.settings import RouterSettings
from tests.flow.patience import PATIENT_ROUTER
from tests.flow.router.fakes import (
    eventually,
    fake_kvmeta,
    fake_worker,
    make_worker,
    raises,
    serve_kvmeta,
    serve_worker,
    waits,
)
from tests.flow.router.memory_ledger import MemoryLedger
from tests.flow.router.stack import DECODE, PREFILL, chat_request, running
from tests.free_ports import held_port


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_slow_ledger_costs_the_turn_its_patience_and_no_more() -> None:
    async with running(settings={"ledger_timeout_seconds": 0.05}) as stack:
        stack.give_handle("c", "d0")
        stack.ledger_servicer.gate.clear()
        answer = await stack.chat("c")
        assert answer.miss == "LEDGER_UNAVAILABLE"
        assert answer.receipt.turn == 0
        assert answer.receipt.prefill_worker_id == "p0"
        assert stack["p0"].params_seen == []
        assert stack["d0"].decodes[0].HasField("commit")
        assert stack["d0"].decodes[0].commit.turn == 0
        assert stack.count("misses_total", reason="ledger_unavailable") == 1
        stack.ledger_servicer.gate.set()


async def test_a_handle_that_comes_too_late_goes_back() -> None:
    async with running(settings={"ledger_timeout_seconds": 0.05}) as stack:
        handle_id = stack.give_handle("c", "d0")
        stack.ledger_servicer.gate.clear()
        gate = asyncio.Event()
        stack["p0"].prefill_steps = [waits(gate)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stack.chat("c"))
            await eventually(lambda: stack["p0"].prefills)
            stack.ledger_servicer.gate.set()
            await eventually(lambda: stack.ledger.returned == [handle_id])
            await eventually(lambda: stack.count("handle_returns_total", outcome="late") == 1)
            gate.set()


async def test_turns_are_answered_while_kvmeta_is_down_and_reuse_comes_back() -> None:
    ledger = MemoryLedger()
    p0 = fake_worker(make_worker("p0", PREFILL), ledger)
    d0 = fake_worker(make_worker("d0", DECODE), ledger)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serve_worker(p0))
        await stack.enter_async_context(serve_worker(d0))
        kvmeta = fake_kvmeta(ledger, [p0.worker, d0.worker])
        kvmeta_port = held_port()
        async with serve_kvmeta(*kvmeta, port=kvmeta_port):
            settings = RouterSettings(
                listen="127.0.0.1:0",
                gateway_listen="",
                kvmeta=f"127.0.0.1:{kvmeta_port}",
                **PATIENT_ROUTER,
                registry_retry_seconds=0.01,
                registry_retry_max_seconds=0.05,
                shutdown_grace_seconds=0,
            )
            router = await stack.enter_async_context(app.build(settings))
            channel = await stack.enter_async_context(rpc.open_channel(f"127.0.0.1:{router.port}"))
            stub = router_pb2_grpc.RouterServiceStub(channel)
            await eventually(lambda: router.follower.connected)

            async def miss_reason() -> int:
                events = [event async for event in stub.Chat(chat_request("c"))]
                return events[-1].result.receipt.miss_reason

            assert await miss_reason() == common_pb2.MISS_REASON_FIRST_TURN
        await eventually(lambda: not router.follower.connected)
        assert await miss_reason() == common_pb2.MISS_REASON_LEDGER_UNAVAILABLE
        assert len(router.pool.models()) == 1
        async with serve_kvmeta(*kvmeta, port=kvmeta_port):
            await eventually(lambda: router.follower.connected)
            assert await miss_reason() == common_pb2.MISS_REASON_UNSPECIFIED


async def test_router_starts_without_kvmeta_and_says_that_there_are_no_workers() -> None:
    settings = RouterSettings(
        listen="127.0.0.1:0", gateway_listen="", kvmeta="127.0.0.1:1", registry_wait_seconds=0.1
    )
    async with (
        app.build(settings) as router,
        rpc.open_channel(f"127.0.0.1:{router.port}") as channel,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        events = aiter(stub.Chat(chat_request()))
        with pytest.raises(UnavailableError, match="no workers") as caught, rpc.typed_errors():
            await anext(events)
        assert caught.value.reason == "NO_WORKERS"
        assert not (await stub.ListModels(router_pb2.ListModelsRequest())).models
        ending = router_pb2.EndConversationRequest(model="m", conversation_id="c")
        with pytest.raises(UnavailableError), rpc.typed_errors():
            await stub.EndConversation(ending)


async def test_a_router_listens_once_it_knows_the_workers() -> None:
    """Balancers send turns to a port as soon as it takes connections."""
    port = held_port()
    ledger = MemoryLedger()
    workers = [
        fake_worker(make_worker(*each), ledger) for each in (("p0", PREFILL), ("d0", DECODE))
    ]
    servicer, registry = fake_kvmeta(ledger, [each.worker for each in workers])
    registry.gate.clear()

    async def open_the_gate() -> None:
        await eventually(lambda: registry.watched)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        registry.gate.set()

    async with AsyncExitStack() as stack:
        for each in workers:
            await stack.enter_async_context(serve_worker(each))
        settings = RouterSettings(
            listen=f"127.0.0.1:{port}",
            gateway_listen="",
            kvmeta=f"127.0.0.1:{await stack.enter_async_context(serve_kvmeta(servicer, registry))}",
            registry_wait_seconds=30,
            shutdown_grace_seconds=0,
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(open_the_gate())
        await stack.enter_async_context(app.build(settings))
        channel = await stack.enter_async_context(rpc.open_channel(settings.listen))
        stub = router_pb2_grpc.RouterServiceStub(channel)
        (model,) = (await stub.ListModels(router_pb2.ListModelsRequest())).models
        assert (model.prefill_workers, model.decode_workers) == (1, 1)


async def test_restarted_registry_that_lists_nobody_yet_drops_nobody() -> None:
    clock = Clock()
    async with running(settings={"worker_grace_seconds": 10}, clock=clock) as stack:
        pool, follower = stack.router.pool, stack.router.follower
        kept, stack.registry.workers = stack.registry.workers, {}
        stack.registry.hang_up()
        await eventually(lambda: not follower.connected)
        await eventually(lambda: follower.connected)
        clock.now += 9
        await stack.chat("c")
        stack.registry.add(kept["p0"])  # p0 registers again, d0 does not
        stack.registry.add(make_worker("p9", PREFILL))
        await eventually(lambda: pool.find("p9"))  # and so p0's message was handled
        clock.now += 2
        assert pool.find("d0") is None
        assert pool.find("p0") is not None


async def test_worker_set_follows_the_registry() -> None:
    async with running(prefill=["p0", "p1"], decode=["d0", "d1"]) as stack:
        pool = stack.router.pool
        stack.registry.remove("p0")
        stack.registry.remove("d0")
        await eventually(lambda: not pool.find("p0") and not pool.find("d0"))
        answer = await stack.chat("c")
        assert answer.receipt.prefill_worker_id == "p1"
        assert answer.receipt.decode_worker_id == "d1"
        stack.registry.add(stack["p0"].worker)
        stack.registry.remove("p1")
        await eventually(lambda: pool.find("p0") and not pool.find("p1"))
        assert (await stack.chat("d")).receipt.prefill_worker_id == "p0"


async def test_a_worker_that_leaves_finishes_its_stream() -> None:
    async with running() as stack:
        gate = asyncio.Event()
        stack["d0"].mid_answer_steps = [waits(gate)]
        events = aiter(stack.stub.Chat(chat_request("c")))
        await anext(events)
        stack.registry.remove("d0")
        await eventually(lambda: stack.router.pool.find("d0") is None)
        gate.set()
        rest = [event.WhichOneof("event") async for event in events]
        assert rest == ["chunk", "result"]


async def test_draining_worker_gets_no_new_turns() -> None:
    async with running() as stack:
        stack["d0"].worker.state = stack["d0"].worker.STATE_DRAINING
        stack.registry.add(stack["d0"].worker)
        await eventually(lambda: not stack.router.pool.models()[0].decode)
        with pytest.raises(UnavailableError) as caught:
            await stack.chat("c")
        assert caught.value.reason == "NO_DECODE_WORKER"
        assert stack["d0"].calls == 0


async def test_a_worker_is_asked_again_after_its_cool_down() -> None:
    clock = Clock()
    settings = {"worker_cooldown_seconds": 5}
    async with running(prefill=["p0", "p1"], settings=settings, clock=clock) as stack:
        stack["p0"].prefill_steps.append(raises(UnavailableError("", reason="WORKER_LOST")))
        await stack.chat()
        assert (await stack.chat()).receipt.prefill_worker_id == "p1"
        clock.now += 5
        assert (await stack.chat()).receipt.prefill_worker_id == "p0"


async def test_one_broken_connection_to_an_engine_does_not_take_its_worker_out() -> None:
    async with running(prefill=["p0", "p1"]) as stack:
        stack["p0"].prefill_steps.append(raises(UnavailableError("", reason="ENGINE_LOST")))
        assert (await stack.chat()).receipt.prefill_worker_id == "p1"
        assert (await stack.chat()).receipt.prefill_worker_id == "p0"
