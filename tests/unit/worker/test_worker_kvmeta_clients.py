"""The sidecar's clients of kvmeta, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest

from kvloop import rpc
from kvloop.errors import (
    ConflictError,
    DeadlineError,
    KvloopError,
    PreconditionError,
    UnavailableError,
)
from kvloop.kvmeta.v1 import registry_pb2
from services.worker.ledger import Commit, Conversation, GrpcLedger
from services.worker.pin_ledger import GrpcPinLedger, PinReport
from services.worker.registry import GrpcRegistry, Lease
from tests.flow.patience import HELD_UP_SECONDS
from tests.free_ports import held_port
from tests.unit.worker.fake_kvmeta import FakeKvmeta, fake_kvmeta
from tests.unit.worker.fakes import ENGINE, PARAMS, until

COMMIT = Commit(
    conversation=Conversation("default", "tiny", "c1", turn=3),
    turn_id="turn-1",
    worker_id="decode-0",
    engine=ENGINE,
    params=PARAMS,
    engine_ttl_seconds=479.25,
    num_tokens=64,
    num_blocks=2,
)


@pytest.fixture
async def kvmeta() -> AsyncIterator[FakeKvmeta]:
    async with fake_kvmeta() as fake:
        yield fake


@pytest.fixture
async def channel(kvmeta: FakeKvmeta) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.open_channel(kvmeta.address) as channel:
        yield channel


async def test_a_commit_carries_everything(kvmeta: FakeKvmeta, channel: grpc.aio.Channel) -> None:
    granted = await GrpcLedger(channel).commit(COMMIT, timeout_seconds=30)
    assert granted == 470
    (request,) = kvmeta.commits
    assert request.transfer_params_json == PARAMS
    assert (request.key.tenant, request.key.model) == ("default", "tiny")
    assert (request.key.conversation_id, request.turn) == ("c1", 3)
    assert (request.request_id, request.worker_id) == ("turn-1", "decode-0")
    assert (request.engine.engine_id, request.engine.epoch) == tuple(ENGINE)
    assert request.engine_ttl.ToMilliseconds() == 479_250
    assert (request.num_tokens, request.num_blocks) == (64, 2)
    assert not request.HasField("retention_ttl")


async def test_a_commit_of_a_renewable_pin_says_how_long_it_can_be_kept(
    kvmeta: FakeKvmeta, channel: grpc.aio.Channel
) -> None:
    renewable = replace(COMMIT, engine_ttl_seconds=60.0, retention_ttl_seconds=480.0)
    await GrpcLedger(channel).commit(renewable, timeout_seconds=30)
    assert kvmeta.commits[0].engine_ttl.seconds == 60
    assert kvmeta.commits[0].retention_ttl.seconds == 480


async def test_pins_are_audited_in_calls_of_ten_thousand(
    kvmeta: FakeKvmeta, channel: grpc.aio.Channel
) -> None:
    reports = [PinReport(f"turn-{number}", 40.25, 120.5) for number in range(10_001)]
    verdicts = await GrpcPinLedger(channel, "decode-0").audit(ENGINE, reports)
    assert [len(audit.pins) for audit in kvmeta.audits] == [10_000, 1]
    assert [verdict.turn_id for verdict in verdicts] == [report.turn_id for report in reports]
    first = kvmeta.audits[0]
    assert (first.worker_id, first.engine.engine_id, first.engine.epoch) == ("decode-0", *ENGINE)
    assert first.pins[0].engine_remaining.ToMilliseconds() == 40_250
    assert first.pins[0].deadline_extension.ToMilliseconds() == 120_500


async def test_handles_are_evicted_in_calls_of_a_thousand(
    kvmeta: FakeKvmeta, channel: grpc.aio.Channel
) -> None:
    turn_ids = [f"turn-{number}" for number in range(1001)]
    evicted = await GrpcPinLedger(channel, "decode-0").evict(ENGINE, turn_ids)
    assert evicted == turn_ids
    assert [len(call.turn_ids) for call in kvmeta.evictions] == [1000, 1]


@pytest.mark.parametrize(
    "error",
    [
        ConflictError("newer", reason="TURN_SUPERSEDED"),
        PreconditionError("gone", reason="ENGINE_GONE"),
        UnavailableError("database is down"),
    ],
)
async def test_the_ledgers_errors_come_back_as_they_were_raised(
    kvmeta: FakeKvmeta, channel: grpc.aio.Channel, error: KvloopError
) -> None:
    kvmeta.error = error
    with pytest.raises(type(error)) as caught:
        await GrpcLedger(channel).commit(COMMIT, timeout_seconds=30)
    assert caught.value.metadata.get("reached") is None


async def test_a_ledger_that_does_not_answer_may_have_stored_the_turn(
    kvmeta: FakeKvmeta, channel: grpc.aio.Channel
) -> None:
    kvmeta.hold = asyncio.Event()
    with pytest.raises(DeadlineError):
        await GrpcLedger(channel).commit(COMMIT, timeout_seconds=HELD_UP_SECONDS)
    assert kvmeta.commits


async def test_a_ledger_that_dies_during_a_commit_may_have_stored_the_turn() -> None:
    async with AsyncExitStack() as life:
        kvmeta = await life.enter_async_context(fake_kvmeta())
        kvmeta.hold = asyncio.Event()
        async with rpc.open_channel(kvmeta.address) as channel:
            commit = GrpcLedger(channel).commit(COMMIT, timeout_seconds=30)
            committing = asyncio.ensure_future(commit)
            await until(lambda: kvmeta.commits)
            await life.aclose()
            with pytest.raises(KvloopError) as caught:
                await committing
    assert "reached" not in caught.value.metadata


async def test_a_ledger_that_is_down_surely_never_saw_the_turn() -> None:
    async with rpc.open_channel("127.0.0.1:1") as channel:
        with pytest.raises(UnavailableError) as caught:
            await GrpcLedger(channel).commit(COMMIT, timeout_seconds=30)
    assert caught.value.metadata["reached"] == "false"


async def test_a_ledger_that_comes_back_is_used_again() -> None:
    port, kvmeta = held_port(), FakeKvmeta()  # type: ignore[abstract]
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        ledger = GrpcLedger(channel)
        with pytest.raises(UnavailableError):
            await ledger.commit(COMMIT, timeout_seconds=30)
        async with fake_kvmeta(kvmeta, port):

            async def committed() -> bool:
                try:
                    return await ledger.commit(COMMIT, timeout_seconds=30) > 0
                except UnavailableError:
                    return False

            await until(committed)
        assert len(kvmeta.commits) == 1


async def test_registering_grants_a_lease(kvmeta: FakeKvmeta, channel: grpc.aio.Channel) -> None:
    worker = registry_pb2.Worker(worker_id="decode-0", model="tiny")
    lease = await GrpcRegistry(channel).register(worker, ttl_seconds=15)
    assert lease == Lease("lease-1", 30.0)
    assert kvmeta.registered[0].worker == worker
    assert kvmeta.registered[0].ttl.seconds == 15


async def test_renewing_says_what_is_granted_and_whether_the_worker_drains(
    kvmeta: FakeKvmeta, channel: grpc.aio.Channel
) -> None:
    registry = GrpcRegistry(channel)
    assert await registry.renew("lease-1", draining=False) == 30
    kvmeta.lease_gone = True
    assert await registry.renew("lease-1", draining=True) == 0
    states = [renewal.state for renewal in kvmeta.renewals]
    assert states == [registry_pb2.Worker.STATE_ACTIVE, registry_pb2.Worker.STATE_DRAINING]


async def test_deregistering_ends_the_lease(kvmeta: FakeKvmeta, channel: grpc.aio.Channel) -> None:
    await GrpcRegistry(channel).deregister("lease-1")
    assert kvmeta.ended == ["lease-1"]
