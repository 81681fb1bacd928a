"""Real kvmeta processes: killed, restarted, raced for, and stopped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc
import pytest

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2_grpc, registry_pb2, registry_pb2_grpc
from tests.contract.kvmeta_process import KvmetaProcess, run_kvmeta
from tests.contract.postgres_server import PostgresServer
from tests.unit.kvmeta import messages

# Processes take their time to start on a busy machine.
pytestmark = pytest.mark.timeout(120)

Reason = common_pb2.MissReason


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request, tmp_path) -> str:
    """A database that outlives the process."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url


def stubs(channel: grpc.aio.Channel):
    return (
        ledger_pb2_grpc.LedgerServiceStub(channel),
        registry_pb2_grpc.RegistryServiceStub(channel),
    )


def open_channel(kvmeta: KvmetaProcess):
    return rpc.open_channel(f"127.0.0.1:{kvmeta.port}")


async def test_a_handle_survives_kill_9_and_is_given_out_once(database_url) -> None:
    name = f"survivor-{database_url[:6]}"
    async with run_kvmeta(database_url) as kvmeta:
        async with open_channel(kvmeta) as channel:
            ledger, registry = stubs(channel)
            await registry.RegisterWorker(messages.register())
            await ledger.CommitTurn(messages.commit(name))
        await kvmeta.kill()
    async with run_kvmeta(database_url) as kvmeta:
        async with open_channel(kvmeta) as channel:
            ledger, _ = stubs(channel)
            taken = await ledger.TakeHandle(messages.take(name))
            assert taken.handle.transfer_params_json == messages.PARAMS
        await kvmeta.kill()
    async with run_kvmeta(database_url) as kvmeta, open_channel(kvmeta) as channel:
        ledger, _ = stubs(channel)
        missed = await ledger.TakeHandle(messages.take(name, request_id="r3"))
        assert missed.miss_reason == Reason.MISS_REASON_TAKEN


async def test_of_64_takers_of_each_of_50_conversations_one_wins(database_url) -> None:
    names = [f"raced-{number}" for number in range(50)]
    async with run_kvmeta(database_url) as kvmeta, open_channel(kvmeta) as channel:
        ledger, registry = stubs(channel)
        await registry.RegisterWorker(messages.register(ttl=300))
        for name in names:
            await ledger.CommitTurn(messages.commit(name, request_id=name))
        calls = [
            ledger.TakeHandle(messages.take(name, request_id=f"{name}-{taker}"))
            for taker in range(64)
            for name in names
        ]
        answers = [await call for call in calls]
        winners = [answer.handle.handle_id for answer in answers if answer.HasField("handle")]
        assert len(winners) == len(set(winners)) == len(names)
        assert await kvmeta.terminate() == 0


@dataclass
class Load:
    """Counts turns and tells when there were enough."""

    until: int
    reached: asyncio.Event
    turns: int = 0

    def count(self) -> None:
        """One more turn."""
        self.turns += 1
        if self.turns == self.until:
            self.reached.set()


@dataclass
class Client:
    """Runs one conversation, turn by turn, and remembers what it was told."""

    name: str
    turns: int = 0
    stored: str = ""
    """The newest handle whose commit was confirmed, until it is given out."""
    given: set[str] = field(default_factory=set)
    """Handles given out to this conversation's turns."""
    uncertain: bool = False
    """A call was broken off: it may or may not have been carried out."""

    async def run(self, ledger: ledger_pb2_grpc.LedgerServiceAsyncStub, load: Load) -> None:
        """Take and commit for ever, until a call fails."""
        while True:
            load.count()
            self.turns += 1
            request_id = f"{self.name}-{self.turns}"
            self.uncertain = True
            taken = await ledger.TakeHandle(messages.take(self.name, request_id))
            self.check(taken)
            self.uncertain = True
            committed = await ledger.CommitTurn(
                messages.commit(self.name, request_id, turn=taken.turn)
            )
            self.stored, self.uncertain = committed.handle_id, False

    def check(self, taken) -> None:
        """Compare a take's answer with what was confirmed before."""
        if taken.HasField("handle"):
            assert taken.handle.handle_id not in self.given, "given out twice"
            self.given.add(taken.handle.handle_id)
        else:
            assert not self.stored, f"lost: {Reason.Name(taken.miss_reason)}"
        self.stored, self.uncertain = "", False

    async def resume(self, ledger: ledger_pb2_grpc.LedgerServiceAsyncStub) -> None:
        """Look at the conversation after the ledger was killed."""
        if self.uncertain:
            self.stored = ""
        self.turns += 1
        self.check(await ledger.TakeHandle(messages.take(self.name, f"{self.name}-{self.turns}")))


async def test_kill_9_under_load_loses_no_handle_and_gives_none_out_twice(database_url) -> None:
    clients = [Client(f"loaded-{number}") for number in range(20)]
    for _ in range(3):
        async with run_kvmeta(database_url) as kvmeta, open_channel(kvmeta) as channel:
            ledger, registry = stubs(channel)
            await registry.RegisterWorker(messages.register(ttl=300))
            await asyncio.gather(*(client.resume(ledger) for client in clients))
            busy = asyncio.Event()
            load = Load(until=400, reached=busy)

            async def kill_when_busy(kvmeta=kvmeta, busy=busy) -> None:
                await busy.wait()
                await kvmeta.kill()

            *ends, _ = await asyncio.gather(
                *(client.run(ledger, load) for client in clients),
                kill_when_busy(),
                return_exceptions=True,
            )
            assert {type(end) for end in ends} == {grpc.aio.AioRpcError}
    assert any(client.uncertain for client in clients)
    assert sum(len(client.given) for client in clients) > 1000


async def test_sigterm_stops_it_while_streams_are_open(database_url) -> None:
    async with run_kvmeta(database_url) as kvmeta, open_channel(kvmeta) as channel:
        _, registry = stubs(channel)
        watch = registry.WatchWorkers(registry_pb2.WatchWorkersRequest())
        await anext(aiter(watch))
        async with asyncio.timeout(10):
            assert await kvmeta.terminate() == 0


async def test_a_database_that_is_away_ends_it_with_1(tmp_path) -> None:
    with pytest.raises(AssertionError, match="DATABASE_UNAVAILABLE"):
        async with run_kvmeta(f"sqlite:///{tmp_path}/missing/ledger.db"):
            pass
