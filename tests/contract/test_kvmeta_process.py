"""Real kvmeta processes: killed, restarted and stopped.

Races, kills under load and outages are in tests/flow/kvmeta.
"""

from __future__ import annotations

import asyncio

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


async def test_sigterm_stops_it_while_streams_are_open(database_url) -> None:
    async with run_kvmeta(database_url) as kvmeta, open_channel(kvmeta) as channel:
        _, registry = stubs(channel)
        watch = registry.WatchWorkers(registry_pb2.WatchWorkersRequest())
        await anext(aiter(watch))
        async with asyncio.timeout(60):
            assert await kvmeta.terminate() == 0


async def test_a_database_that_is_away_ends_it_with_1(tmp_path) -> None:
    with pytest.raises(AssertionError, match="DATABASE_UNAVAILABLE"):
        async with run_kvmeta(f"sqlite:///{tmp_path}/missing/ledger.db"):
            pass
