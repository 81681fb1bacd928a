"""What a kvmeta does when it starts, and what it survives."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import OutOfRangeError, UnavailableError, UnsupportedError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvloop.rpc import typed_errors
from services.kvmeta import app
from services.kvmeta.settings import KvmetaSettings
from tests.unit.kvmeta import messages
from tests.unit.kvmeta.conftest import Served
from tests.unit.kvmeta.fake_host import FakeHost

Reason = common_pb2.MissReason
WANTED = ledger_pb2.PinStatus.VERDICT_WANTED


@pytest.fixture
def host() -> FakeHost:
    """The machine's clocks."""
    return FakeHost()


@pytest.fixture
def start(tmp_path: Path, host: FakeHost):
    """Starts a kvmeta, each time on the same database file."""

    @asynccontextmanager
    async def started(**more) -> AsyncIterator[Served]:
        settings = KvmetaSettings(
            **{
                "listen": "127.0.0.1:0",
                "database_url": f"sqlite+aiosqlite:///{tmp_path}/ledger.db",
                "sweep_interval_seconds": 3600,
                "shutdown_grace_seconds": 0,
                **more,
            }
        )
        async with (
            app.build(settings, host=host) as kvmeta,
            rpc.open_channel(f"127.0.0.1:{kvmeta.port}") as channel,
        ):
            yield Served(
                kvmeta,
                ledger_pb2_grpc.LedgerServiceStub(channel),
                registry_pb2_grpc.RegistryServiceStub(channel),
            )

    return started


async def outcome(served: Served, request_id: str = "r2") -> str:
    """What a take gets: `handle`, or the name of the reason."""
    response = await served.ledger.TakeHandle(messages.take(request_id=request_id))
    if response.HasField("handle"):
        assert response.handle.transfer_params_json == messages.PARAMS
        return "handle"
    return Reason.Name(response.miss_reason)


async def test_handles_survive_a_restart(start, host) -> None:
    async with start() as served:
        await served.registry.RegisterWorker(messages.register())
        await served.ledger.CommitTurn(messages.commit())
    host.advance(60)
    async with start() as served:
        assert await outcome(served) == "handle"


async def test_a_handle_given_out_before_a_restart_is_not_given_out_after_it(start) -> None:
    async with start() as served:
        await served.registry.RegisterWorker(messages.register())
        await served.ledger.CommitTurn(messages.commit())
        assert await outcome(served, "r2") == "handle"
    async with start() as served:
        assert await outcome(served, "r3") == "MISS_REASON_TAKEN"
        assert await outcome(served, "r2") == "handle"  # its holder asks again


async def test_leases_get_a_full_period_after_a_restart(start, host) -> None:
    async with start() as served:
        lease_id = (await served.registry.RegisterWorker(messages.register())).lease_id
        await served.ledger.CommitTurn(messages.commit())
    host.advance(300)  # twenty leases
    async with start() as served:
        await served.kvmeta.sweeper.sweep()
        host.advance(14)

        async def renewals():
            yield registry_pb2.KeepAliveRequest(lease_id=lease_id)

        answer = await anext(aiter(served.registry.KeepAlive(renewals())))
        assert answer.granted_ttl == messages.seconds(15)
        assert await outcome(served) == "handle"


@pytest.mark.parametrize("database", ["memory", "sqlite"])
async def test_watchers_do_not_resume_in_another_history(start, host, tmp_path, database) -> None:
    @asynccontextmanager
    async def fresh(name: str) -> AsyncIterator[Served]:
        """A kvmeta that knows nothing but three workers."""
        file = f"sqlite:///{tmp_path}/{name}.db"
        async with start(database_url="memory:" if database == "memory" else file) as served:
            for worker_id in ("d1", "d2", "d3"):
                await served.registry.RegisterWorker(messages.register(worker_id))
            yield served

    def watched(served: Served, after_revision: int):
        request = registry_pb2.WatchWorkersRequest(after_revision=after_revision)
        return aiter(served.registry.WatchWorkers(request))

    async with fresh("one") as served:
        first = await anext(watched(served, 0))
    host.advance(60)
    async with fresh("two") as served:
        with pytest.raises(OutOfRangeError), typed_errors():
            await anext(watched(served, first.revision))


@pytest.mark.parametrize("step", [-36_000, 36_000])
async def test_a_stepped_wall_clock_neither_expires_nor_resurrects(start, host, step) -> None:
    async with start() as served:
        await served.registry.RegisterWorker(messages.register(ttl=300))
        await served.ledger.CommitTurn(messages.commit())
        host.step_wall(step)
        await served.kvmeta.sweeper.sweep()
    host.step_wall(step)
    host.advance(300)
    async with start() as served:
        await served.kvmeta.sweeper.sweep()
        host.step_wall(step)
        host.advance(174)
        assert await outcome(served) == "handle"


@pytest.mark.parametrize("step", [-36_000, 36_000])
async def test_an_expired_handle_stays_expired_whatever_the_wall_clock_does(
    start, host, step
) -> None:
    async with start() as served:
        await served.registry.RegisterWorker(messages.register(ttl=300))
        await served.ledger.CommitTurn(messages.commit())
    host.step_wall(step)
    host.advance(475)
    async with start() as served:
        assert await outcome(served) == "MISS_REASON_EXPIRED"


@pytest.mark.parametrize("step", [-36_000, 36_000])
async def test_a_stepped_wall_clock_moves_no_renewed_deadline(start, host, step) -> None:
    def renew(extension: float) -> ledger_pb2.RenewPinsRequest:
        pin = ledger_pb2.HeldPin(
            turn_id="r1",
            engine_remaining=messages.seconds(60),
            deadline_extension=messages.seconds(extension),
        )
        return ledger_pb2.RenewPinsRequest(worker_id="d1", engine=messages.engine(), pins=[pin])

    async with start() as served:
        await served.registry.RegisterWorker(messages.register(ttl=300))
        leased = messages.commit()
        leased.engine_ttl.CopyFrom(messages.seconds(60))
        leased.retention_ttl.CopyFrom(messages.seconds(480))
        await served.ledger.CommitTurn(leased)
        host.advance(20)
        host.step_wall(step)
        await served.ledger.RenewPins(renew(20))
    host.step_wall(step)
    host.advance(40)  # past the first lease
    async with start() as served:
        await served.kvmeta.sweeper.sweep()
        host.step_wall(step)
        host.advance(14)
        assert (await served.ledger.RenewPins(renew(20))).pins[0].verdict == WANTED
        host.advance(1)  # 75 s after the commit
        [status] = (await served.ledger.RenewPins(renew(75))).pins
        assert status.verdict == ledger_pb2.PinStatus.VERDICT_RELEASE
        assert await outcome(served) == "MISS_REASON_EXPIRED"


async def test_a_reboot_voids_what_was_out(start, host) -> None:
    async with start() as served:
        await served.registry.RegisterWorker(messages.register())
        await served.ledger.CommitTurn(messages.commit())
    host.reboot(30)
    async with start() as served:
        assert await outcome(served) == "MISS_REASON_VOID"
        count = served.kvmeta.metrics.registry.get_sample_value
        assert count("kvloop_kvmeta_voided_handles_total") == 1
    async with start() as served:  # only once
        await served.ledger.CommitTurn(messages.commit(request_id="r5"))
    async with start() as served:
        assert await outcome(served, "r6") == "handle"


async def test_the_deployments_handle_ttl_bounds_every_handle(start, host) -> None:
    async with start(handle_ttl_seconds=60) as served:
        registered = await served.registry.RegisterWorker(messages.register(ttl=300))
        assert registered.handle_ttl == messages.seconds(60)
        committed = await served.ledger.CommitTurn(messages.commit())
        assert committed.granted_ttl == messages.seconds(60)
        host.advance(60)
        assert await outcome(served) == "MISS_REASON_EXPIRED"


async def test_counters_are_exposed_over_http(start) -> None:
    async with start(metrics_listen="127.0.0.1:0") as served:
        await outcome(served)
        url = f"http://127.0.0.1:{served.kvmeta.metrics_port}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        assert 'kvloop_kvmeta_takes_total{outcome="first_turn"} 1.0' in page


async def test_an_unusable_database_stops_the_start(start) -> None:
    with pytest.raises(UnavailableError):
        async with start(database_url="sqlite:////dev/null/ledger.db"):
            pass


async def test_a_missing_postgresql_driver_says_what_to_install(start, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(UnsupportedError, match=r"kvloop\[postgres\]"):
        async with start(database_url="postgresql://kvloop@nowhere/kvloop"):
            pass


async def test_an_address_in_use_stops_the_start(start, tmp_path) -> None:
    async with start() as served:
        taken = f"127.0.0.1:{served.kvmeta.port}"
        with pytest.raises(OSError, match="cannot listen"):
            async with start(listen=taken, database_url=f"sqlite:///{tmp_path}/other.db"):
                pass


async def test_two_processes_on_one_sqlite_file_give_a_handle_out_once(start) -> None:
    async with start() as one, start() as two:
        await one.registry.RegisterWorker(messages.register())
        for number in range(10):
            name = f"c-{number}"
            await one.ledger.CommitTurn(messages.commit(name, request_id=name))
            takers = [
                served.ledger.TakeHandle(messages.take(name, request_id=f"{name}-{taker}-{where}"))
                for taker in range(4)
                for where, served in (("one", one), ("two", two))
            ]
            taken = [response.HasField("handle") for response in await asyncio.gather(*takers)]
            assert taken.count(True) == 1
