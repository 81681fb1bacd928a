"""A sidecar's life: start, registration, outages, engine death, shutdown."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError, PreconditionError, UnavailableError
from kvloop.kvmeta.v1 import registry_pb2
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.worker import app
from services.worker.clock import SystemClock
from services.worker.engine import DONE
from services.worker.registration import HEARD_SECONDS
from tests.flow.worker.stack import (
    CHAT,
    ENGINE_REF,
    FIRST,
    LAST,
    SILENT_ENGINE,
    USAGE,
    answer,
    collect,
    connector_of,
    decode_request,
    next_chunk,
    settings,
    sidecar,
)
from tests.free_ports import held_port
from tests.unit.worker.fake_events_client import FakeEventsClient, connect
from tests.unit.worker.fake_kvmeta import FakeKvmeta, fake_kvmeta
from tests.unit.worker.fake_vllm import fake_vllm
from tests.unit.worker.fakes import FakeEngine, FakeLedger, FakeRegistry, until


async def test_a_worker_registers_under_the_address_where_it_serves(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        (request,) = stack.kvmeta.registered
        assert request.worker.traits.prepared_legs == 256
    assert request.worker.address == f"127.0.0.1:{stack.worker.port}"
    assert (request.worker.worker_id, request.worker.model) == ("decode-0", "tiny")
    assert request.worker.engine == ENGINE_REF


class _Hearing(SystemClock):
    """A clock on which routers hear of the worker, and time passes, when the test says so."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.waiting = asyncio.Event()
        self.heard = asyncio.Event()

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    async def sleep(self, seconds: float) -> None:
        if seconds != HEARD_SECONDS:
            await super().sleep(seconds)
            return
        self.waiting.set()
        await self.heard.wait()


async def test_a_worker_is_ready_when_routers_have_heard_of_it_and_stays_so(
    tmp_path: Path,
) -> None:
    port, kvmeta = held_port(), FakeKvmeta()  # type: ignore[abstract]
    chosen = settings(tmp_path, kvmeta=f"127.0.0.1:{port}", engine_poll_seconds=1)
    clock = _Hearing()
    async with (
        connector_of(chosen),
        app.build(chosen, engine=FakeEngine(), clock=clock) as worker,
        rpc.open_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)

        async def serving(name: str) -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        name = "kvloop.worker.v1.WorkerService"
        assert await serving("")
        assert not await serving(name)
        async with fake_kvmeta(kvmeta, port):
            await until(clock.waiting.is_set)
            assert worker.registration.registered
            assert not await serving(name)
            clock.heard.set()
            await until(lambda: serving(name))
        clock.ahead += kvmeta.lease_seconds
        assert not worker.registration.registered
        assert await serving(name)


async def test_worker_info_is_the_record_and_the_engines_load(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        info = await stack.stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
        assert info.worker == stack.kvmeta.registered[0].worker
    assert (info.engine_running, info.engine_waiting, info.kv_cache_usage) == (4, 2, 0.5)
    assert info.registered
    assert info.in_flight == 0


@pytest.mark.parametrize(
    ("api", "body", "tokens"),
    [
        (common_pb2.API_CHAT_COMPLETIONS, b'{"messages":[],"max_tokens":5}', 7),
        (common_pb2.API_COMPLETIONS, b'{"prompt":"text"}', 7),
        (common_pb2.API_COMPLETIONS, b'{"prompt":[1,2,3]}', 3),
    ],
)
async def test_tokens_are_counted_without_running_the_model(
    tmp_path: Path, api, body, tokens
) -> None:
    async with sidecar(tmp_path) as stack:
        request = worker_pb2.CountTokensRequest(api=api, body_json=body)
        reply = await stack.stub.CountTokens(request)
        assert stack.vllm.requests(CHAT) == []
    assert (reply.num_tokens, reply.max_model_len) == (tokens, 4096)


async def test_releases_go_to_the_engine_that_they_are_for(tmp_path: Path) -> None:
    params = [b'{"remote_request_id":"a", "x":[1]}', b'{"x":1}', b'{"remote_request_id":"b"}']
    async with sidecar(tmp_path) as stack:
        request = worker_pb2.ReleaseBlocksRequest(engine=ENGINE_REF, transfer_params_json=params)
        assert (await stack.stub.ReleaseBlocks(request)).sent == 2
        assert await stack.connector.release() == ["a", "b"]
        request.engine.epoch = "another life"
        assert (await stack.stub.ReleaseBlocks(request)).sent == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"transfer_params_json": [b"{}"]}, "engine"),
        ({"engine": ENGINE_REF}, "transfer_params_json"),
        ({"engine": ENGINE_REF, "transfer_params_json": [b"{}"] * 1001}, "transfer_params_json"),
    ],
)
async def test_release_requests_are_checked(tmp_path: Path, fields, field) -> None:
    async with sidecar(tmp_path) as stack:
        with pytest.raises(InvalidFieldError) as caught, rpc.typed_errors():
            await stack.stub.ReleaseBlocks(worker_pb2.ReleaseBlocksRequest(**fields))
    assert caught.value.field == field


async def test_a_lease_that_is_lost_is_taken_again(tmp_path: Path) -> None:
    async with sidecar(tmp_path, lease_ttl_seconds=15) as stack:
        stack.kvmeta.lease_gone = True
        stack.kvmeta.lease_seconds = 1
        async with connect(tmp_path / "e.sock", epoch="epoch-2"):
            await until(lambda: len(stack.kvmeta.registered) == 2)
            assert stack.kvmeta.registered[1].worker.engine.epoch == "epoch-2"
            stack.kvmeta.lease_gone = True
            await until(lambda: len(stack.kvmeta.registered) == 3)


async def test_kvmeta_may_come_late_and_go_and_come_back(tmp_path: Path) -> None:
    port, kvmeta = held_port(), FakeKvmeta()  # type: ignore[abstract]
    chosen = settings(tmp_path, kvmeta=f"127.0.0.1:{port}", lease_ttl_seconds=4)
    async with (
        connector_of(chosen),
        app.build(chosen, engine=FakeEngine()) as worker,
    ):
        assert not worker.registration.registered
        kvmeta.lease_seconds = 4
        for life in (1, 2):
            async with fake_kvmeta(kvmeta, port):
                await until(lambda life=life: len(kvmeta.registered) == life)
                await until(lambda: worker.registration.registered)
                seen = len(kvmeta.renewals)
                await until(lambda seen=seen: len(kvmeta.renewals) > seen)
            await until(lambda: not worker.registration.registered)
            kvmeta.lease_gone = True
            assert len(kvmeta.registered) == life


async def test_without_kvmeta_turns_are_answered_and_their_blocks_released(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    engine = FakeEngine()
    async with connector_of(chosen) as connecting, app.build(chosen, engine=engine) as worker:
        connector = await connecting
        reported = asyncio.Event()
        engine.script = [FIRST, reported, LAST, DONE]
        async with rpc.open_channel(f"127.0.0.1:{worker.port}") as channel:
            call = _stub(channel).Decode(decode_request())
            await next_chunk(call)
            await connector.finish("turn-1")
            reported.set()
            chunks, summary = await collect(call)
        assert await connector.release() == ["req-1"]
    assert chunks == [LAST]
    assert summary.commit_outcome == worker_pb2.COMMIT_OUTCOME_LEDGER_UNAVAILABLE


async def test_at_shutdown_legs_in_flight_end_and_then_the_lease(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with AsyncExitStack() as around:
        vllm = await around.enter_async_context(fake_vllm())
        kvmeta = await around.enter_async_context(fake_kvmeta())
        kvmeta.lease_seconds = 300  # which is not renewed before the worker drains
        chosen = settings(tmp_path, engine_url=vllm.url, kvmeta=kvmeta.address, grace_seconds=10)
        connecting = await around.enter_async_context(connector_of(chosen))
        life = AsyncExitStack()
        worker = await life.enter_async_context(app.build(chosen))
        await until(lambda: worker.registration.registered)
        channel = await around.enter_async_context(rpc.open_channel(f"127.0.0.1:{worker.port}"))
        vllm.answers[CHAT] = answer(gate)
        call = _stub(channel).Decode(decode_request())
        await next_chunk(call)

        async with asyncio.TaskGroup() as group:
            group.create_task(_finish_when_draining(kvmeta, await connecting, gate))
            reading = group.create_task(collect(call))
            await life.aclose()
    chunks, summary = reading.result()
    assert chunks == [LAST, USAGE]
    assert summary.commit_outcome == worker_pb2.COMMIT_OUTCOME_COMMITTED
    assert kvmeta.ended == ["lease-1"]


async def _finish_when_draining(
    kvmeta: FakeKvmeta, connector: FakeEventsClient, gate: asyncio.Event
) -> None:
    await until(lambda: kvmeta.renewals)
    assert kvmeta.renewals[-1].state == registry_pb2.Worker.STATE_DRAINING
    assert kvmeta.ended == []
    await connector.finish("turn-1")
    gate.set()


async def test_a_draining_worker_takes_no_new_turns_and_says_so(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        stack.worker.admission.drain()
        with pytest.raises(UnavailableError) as caught, rpc.typed_errors():
            await collect(stack.stub.Decode(decode_request()))
        info = await stack.stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
    assert caught.value.reason == "DRAINING"
    assert info.worker.state == registry_pb2.Worker.STATE_DRAINING


class _Naps(SystemClock):
    """Notes how often the worker pauses for its drain, and which leases had ended by then."""

    def __init__(self, drain_seconds: float, registry: FakeRegistry) -> None:
        self._drain_seconds = drain_seconds
        self._registry = registry
        self.naps: list[list[str]] = []

    async def sleep(self, seconds: float) -> None:
        if seconds != self._drain_seconds:
            await super().sleep(seconds)
            return
        self.naps.append(list(self._registry.ended))


@pytest.mark.parametrize(
    ("role", "legs", "naps"), [("prefill", 1, [[]]), ("prefill", 0, []), ("decode", 1, [])]
)
async def test_a_prefill_engine_lives_on_while_decode_reads_its_last_prompts(
    tmp_path: Path, role: str, legs: int, naps: list[list[str]]
) -> None:
    chosen = settings(tmp_path, role, drain_seconds=0.0123)
    registry = FakeRegistry()
    clock = _Naps(0.0123, registry)
    with ExitStack() as in_flight:
        async with (
            connector_of(chosen),
            app.build(
                chosen, engine=FakeEngine(), registry=registry, ledger=FakeLedger(), clock=clock
            ) as worker,
        ):
            await until(lambda: worker.registration.registered)
            for _ in range(legs):
                in_flight.enter_context(worker.admission.leg())
    assert clock.naps == naps
    assert registry.ended == ["lease-1"]


async def test_nothing_is_handed_over_by_an_engine_that_is_gone(tmp_path: Path) -> None:
    chosen = settings(tmp_path, "prefill", drain_seconds=0.0123, engine_poll_seconds=0.01)
    engine, registry = FakeEngine(), FakeRegistry()
    clock = _Naps(0.0123, registry)

    async def live() -> None:
        with ExitStack() as in_flight:
            async with (
                connector_of(chosen),
                app.build(
                    chosen, engine=engine, registry=registry, ledger=FakeLedger(), clock=clock
                ) as worker,
            ):
                await until(lambda: worker.registration.registered)
                in_flight.enter_context(worker.admission.leg())
                engine.is_healthy = lambda: False
                await asyncio.Event().wait()

    with pytest.raises(UnavailableError):
        await live()
    assert clock.naps == []


async def test_an_attached_engine_that_stops_answering_ends_the_sidecar(tmp_path: Path) -> None:
    chosen = settings(tmp_path, engine_poll_seconds=0.01)
    engine, registry = FakeEngine(), FakeRegistry()

    async def live() -> None:
        async with (
            connector_of(chosen),
            app.build(chosen, engine=engine, registry=registry, ledger=FakeLedger()) as worker,
        ):
            await until(lambda: worker.registration.registered)
            engine.is_healthy = lambda: False
            await asyncio.Event().wait()

    with pytest.raises(UnavailableError) as caught:
        await live()
    assert caught.value.reason == "ENGINE_DIED"
    assert registry.ended == ["lease-1"]


async def test_a_refused_registration_ends_the_sidecar_with_the_reason(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    registry = FakeRegistry()
    registry.failures = [PreconditionError("too long", reason="LEDGER_TTL_TOO_LONG")]
    with pytest.raises(PreconditionError) as caught:
        async with (
            connector_of(chosen),
            app.build(chosen, engine=FakeEngine(), registry=registry),
        ):
            await asyncio.Event().wait()
    assert caught.value.reason == "LEDGER_TTL_TOO_LONG"


async def test_an_engine_without_our_connector_is_never_registered(tmp_path: Path) -> None:
    registry = FakeRegistry()
    chosen = settings(tmp_path, hello_timeout_seconds=0.05)
    with pytest.raises(PreconditionError) as caught:
        async with app.build(chosen, engine=FakeEngine(), registry=registry):
            pass
    assert caught.value.reason == "CONNECTOR_NOT_LOADED"
    assert registry.registered == []


async def test_an_engine_for_the_other_leg_is_never_registered(tmp_path: Path) -> None:
    registry = FakeRegistry()
    chosen = settings(tmp_path, "prefill")
    other = settings(tmp_path, "decode")
    with pytest.raises(PreconditionError) as caught:
        async with (
            connector_of(other),
            app.build(chosen, engine=FakeEngine(), registry=registry),
        ):
            pass
    assert caught.value.reason == "WRONG_ROLE"
    assert registry.registered == []


async def test_a_loopback_side_channel_behind_a_real_address_is_refused(tmp_path: Path) -> None:
    chosen = settings(tmp_path, advertise="10.1.2.3:7400")
    with pytest.raises(PreconditionError) as caught:
        async with connector_of(chosen), app.build(chosen, engine=FakeEngine()):
            pass
    assert caught.value.reason == "LOOPBACK_SIDE_CHANNEL"


async def test_a_taken_port_is_noticed_before_the_engine_is_waited_for(tmp_path: Path) -> None:
    async with fake_kvmeta() as kvmeta:
        chosen = settings(tmp_path, listen=kvmeta.address)
        with pytest.raises(OSError, match="cannot listen"):
            async with app.build(chosen):
                pass


async def test_metrics_are_served_for_prometheus(tmp_path: Path) -> None:
    address = f"127.0.0.1:{held_port()}"
    async with sidecar(tmp_path, metrics_listen=address, **SILENT_ENGINE) as stack:
        stack.vllm.answers[CHAT] = answer()
        await collect(stack.stub.Decode(decode_request()))
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}/") as reply:
            text = await reply.text()
    assert 'kvloop_worker_commits_total{outcome="NO_EVENT"} 1.0' in text


def _stub(channel: aio.Channel) -> worker_pb2_grpc.WorkerServiceAsyncStub:
    stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
    return stub
