"""What sidecars rely on when they ask about pins: of the real ledger, and of the fake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import grpc
import pytest

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import PreconditionError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.kvmeta import app as kvmeta_app
from services.kvmeta.settings import KvmetaSettings
from services.worker.event_messages import EngineRef
from services.worker.ledger import Commit, Conversation, GrpcLedger
from services.worker.pin_ledger import GrpcPinLedger, PinLedger, PinReport, PinVerdict, Verdict
from tests.flow.worker.registered import register_decode
from tests.unit.worker.fake_pin_ledger import FakePinLedger
from tests.unit.worker.fakes import ENGINE, PARAMS

WORKER = "decode-0"
LEASE = 60.0


class World(Protocol):
    """A ledger, and what others do in it. Turns belong to conversations of their name."""

    pins: PinLedger

    async def commit(self, name: str) -> None:
        """A turn is committed, renewable for 480 s."""

    async def take(self, name: str) -> None:
        """The next turn takes its handle."""

    async def end(self, name: str) -> None:
        """Its conversation is ended."""


class _RealWorld:
    """kvmeta, over real gRPC."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.pins: PinLedger = GrpcPinLedger(channel, WORKER)
        self._ledger = GrpcLedger(channel)
        self._stub: ledger_pb2_grpc.LedgerServiceAsyncStub = ledger_pb2_grpc.LedgerServiceStub(
            channel
        )

    async def commit(self, name: str) -> None:
        commit = Commit(
            conversation=Conversation("acme", "tiny", name, turn=0),
            turn_id=name,
            worker_id=WORKER,
            engine=ENGINE,
            params=PARAMS,
            engine_ttl_seconds=LEASE,
            num_tokens=64,
            num_blocks=2,
            retention_ttl_seconds=480,
        )
        await self._ledger.commit(commit, timeout_seconds=30)

    async def take(self, name: str) -> None:
        taken = await self._stub.TakeHandle(
            ledger_pb2.TakeHandleRequest(key=_key(name), request_id=f"{name}-next")
        )
        assert taken.WhichOneof("outcome") == "handle"

    async def end(self, name: str) -> None:
        await self._stub.ReleaseConversation(ledger_pb2.ReleaseConversationRequest(key=_key(name)))


class _FakeWorld:
    """The fake, told what a ledger would have learnt."""

    def __init__(self) -> None:
        self.fake = FakePinLedger()
        self.pins: PinLedger = self.fake

    async def commit(self, name: str) -> None:
        self.fake.knows(name, Verdict.WANTED, wanted_seconds=480, tenant="acme")

    async def take(self, name: str) -> None:
        self.fake.knows(name, Verdict.IN_USE, tenant="acme")

    async def end(self, name: str) -> None:
        self.fake.knows(name, Verdict.RELEASE, tenant="acme")


def _key(name: str) -> common_pb2.ConversationKey:
    return common_pb2.ConversationKey(tenant="acme", model="tiny", conversation_id=name)


@asynccontextmanager
async def _real() -> AsyncIterator[_RealWorld]:
    settings = KvmetaSettings(listen="127.0.0.1:0", database_url="memory:")
    async with kvmeta_app.build(settings) as kvmeta:
        address = f"127.0.0.1:{kvmeta.port}"
        async with rpc.open_channel(address) as channel:
            await register_decode(channel, WORKER)
            yield _RealWorld(channel)


@pytest.fixture(params=["kvmeta", "fake"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "fake":
        yield _FakeWorld()
        return
    async with _real() as real:
        yield real


async def _verdict(world: World, name: str) -> PinVerdict:
    (verdict,) = await world.pins.audit(ENGINE, [PinReport(name, LEASE, 0.0)])
    assert verdict.turn_id == name
    return verdict


async def test_a_turn_that_the_next_may_want_is_wanted(world: World) -> None:
    await world.commit("a")
    verdict = await _verdict(world, "a")
    assert verdict.verdict is Verdict.WANTED
    assert verdict.wanted_seconds == pytest.approx(480, abs=10)
    assert verdict.tenant == "acme"


async def test_a_turn_whose_handle_is_given_out_is_in_use(world: World) -> None:
    await world.commit("a")
    await world.take("a")
    assert (await _verdict(world, "a")).verdict is Verdict.IN_USE


async def test_a_turn_of_an_ended_conversation_may_be_released(world: World) -> None:
    await world.commit("a")
    await world.end("a")
    assert (await _verdict(world, "a")).verdict is Verdict.RELEASE


async def test_a_turn_that_was_never_heard_of_is_unowned(world: World) -> None:
    verdict = await _verdict(world, "a")
    assert (verdict.verdict, verdict.tenant) == (Verdict.UNOWNED, "")


async def test_every_pin_gets_a_verdict(world: World) -> None:
    names = [f"turn-{number}" for number in range(20)]
    for name in names[:5]:
        await world.commit(name)
    verdicts = await world.pins.audit(ENGINE, [PinReport(name, LEASE, 0.0) for name in names])
    found = {verdict.turn_id: verdict.verdict for verdict in verdicts}
    assert found == {
        name: Verdict.WANTED if name in names[:5] else Verdict.UNOWNED for name in names
    }


async def test_nothing_to_audit_is_fine(world: World) -> None:
    assert list(await world.pins.audit(ENGINE, [])) == []


async def test_only_handles_that_nobody_has_are_evicted(world: World) -> None:
    for name in ("free", "taken", "ended"):
        await world.commit(name)
    await world.take("taken")
    await world.end("ended")
    assert list(await world.pins.evict(ENGINE, ["free", "taken", "ended", "unknown"])) == ["free"]
    assert (await _verdict(world, "free")).verdict is Verdict.RELEASE
    assert (await _verdict(world, "taken")).verdict is Verdict.IN_USE
    assert list(await world.pins.evict(ENGINE, ["free"])) == []


async def test_an_engine_that_the_ledger_does_not_know_has_no_pins_to_ask_about() -> None:
    async with _real() as world:
        with pytest.raises(PreconditionError) as caught:
            await world.pins.audit(EngineRef("engine-1", "epoch-2"), [PinReport("a", LEASE, 0.0)])
    assert caught.value.reason == "ENGINE_GONE"


async def test_what_the_engine_confirms_is_how_long_the_handle_is_given_out() -> None:
    async with _real() as world:
        await world.commit("a")
        await world.pins.audit(ENGINE, [PinReport("a", 55.0, 20.0)])
        taken = await world._stub.TakeHandle(
            ledger_pb2.TakeHandleRequest(key=_key("a"), request_id="a-next")
        )
    assert taken.handle.deadline_extension.seconds == 20


async def test_a_ledger_out_of_reach_is_said_to_be() -> None:
    async with rpc.open_channel("127.0.0.1:1") as channel:
        pins = GrpcPinLedger(channel, WORKER)
        with pytest.raises(UnavailableError):
            await pins.audit(ENGINE, [PinReport("a", LEASE, 0.0)])
        with pytest.raises(UnavailableError):
            await pins.evict(ENGINE, ["a"])
