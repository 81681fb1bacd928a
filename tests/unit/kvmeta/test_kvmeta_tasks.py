"""The long tasks go on through outages and do all that is due."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from kvloop.errors import UnavailableError
from services.kvmeta.bell import Bell, wait
from services.kvmeta.clock import LedgerClock
from services.kvmeta.memory_store import MemoryStore
from services.kvmeta.metrics import KvmetaMetrics
from services.kvmeta.model import Release, ReleaseCause
from services.kvmeta.sweeper import Sweeper, keep_clock
from tests.contract.kvmeta_stores import (
    LEASE_US,
    POLICY,
    SECOND,
    ManualClock,
    commit,
    key,
    register,
    stored,
)
from tests.unit.kvmeta.fake_host import FakeHost


def sweeper(store: MemoryStore, clock: ManualClock, batch_rows: int = 10) -> Sweeper:
    return Sweeper(
        store,
        clock,
        batch_rows=batch_rows,
        changed=Bell(),
        released=Bell(),
        metrics=KvmetaMetrics(CollectorRegistry()),
    )


async def test_one_sweep_does_all_that_is_due_in_batches(clock) -> None:
    store = MemoryStore(clock, POLICY)
    await register(store)
    for number in range(25):
        await stored(store, commit(key(f"c-{number}"), request_id=f"r{number}"))
    clock.advance(475)
    await sweeper(store, clock).sweep()
    releases = await store.releases("d1", 0, 100)
    assert isinstance(releases, list)
    assert len(releases) == 25
    clock.advance(10_000)
    await sweeper(store, clock).sweep()
    assert await store.conversations("t", None, None, 100) == []
    assert await store.releases("d1", 0, 100) == []
    clock.advance(POLICY.dead_retention_us)
    await sweeper(store, clock).sweep()
    assert await store.worker_changes(0) == []


async def test_the_sweeper_goes_on_after_an_outage_of_the_store(clock) -> None:
    recovered = asyncio.Event()

    class Flaky(MemoryStore):
        calls = 0

        async def end_leases(self, limit: int) -> list[str]:
            self.calls += 1
            if self.calls < 3:
                raise UnavailableError("away")
            return await super().end_leases(limit)

        async def forget_workers(self, limit: int) -> int:
            recovered.set()
            return await super().forget_workers(limit)

    store = Flaky(clock, POLICY)
    await register(store)
    await stored(store, commit())
    clock.advance(475)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(sweeper(store, clock).run(interval_seconds=0.001))
        await recovered.wait()
        running.cancel()
    [release] = cast("list[Release]", await store.releases("d1", 0, 10))
    assert release.cause is ReleaseCause.EXPIRED


async def test_nobody_loses_a_lease_that_could_not_be_renewed(clock) -> None:
    class Flaky(MemoryStore):
        away = True

        async def end_leases(self, limit: int) -> list[str]:
            if self.away:
                raise UnavailableError("away")
            return await super().end_leases(limit)

    store = Flaky(clock, POLICY)
    await register(store)
    sweeps = sweeper(store, clock)
    with pytest.raises(UnavailableError):
        await sweeps.sweep()
    clock.advance(LEASE_US / SECOND)
    store.away = False
    await sweeps.sweep()
    clock.advance(LEASE_US / SECOND - 1)
    await sweeps.sweep()
    assert len((await store.registry())[1]) == 1
    clock.advance(1)  # a full period later, and nothing was renewed
    await sweeps.sweep()
    assert (await store.registry())[1] == []


async def test_nobody_loses_a_lease_while_a_call_hung(clock) -> None:
    class Hanging(MemoryStore):
        async def forget_workers(self, limit: int) -> int:
            clock.advance(LEASE_US / SECOND)
            return 0

    store = Hanging(clock, POLICY)
    await register(store)
    sweeps = sweeper(store, clock)
    await sweeps.sweep()
    await sweeps.sweep()
    assert len((await store.registry())[1]) == 1


async def test_a_defect_in_the_sweeper_is_not_hidden(clock) -> None:
    class Broken(MemoryStore):
        async def sweep(self, limit: int):
            raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        await sweeper(Broken(clock, POLICY), clock).run(interval_seconds=0.001)


async def test_the_clock_is_stored_and_follows_other_replicas_through_outages() -> None:
    host = FakeHost()
    ledger_clock = LedgerClock(1_000, host.up_us, host.uptime_us)

    saved: list[int] = []
    enough = asyncio.Event()

    class Marks:
        async def load(self):
            raise AssertionError("not called")

        async def save(self, clock) -> int:
            saved.append(clock.now_us())
            if len(saved) == 2:
                raise UnavailableError("away")
            if len(saved) == 4:
                enough.set()
            return 5_000 if len(saved) == 3 else clock.now_us()

    async with asyncio.TaskGroup() as group:
        running = group.create_task(keep_clock(ledger_clock, Marks(), interval_seconds=0.001))
        await enough.wait()
        running.cancel()
    assert saved[:4] == [1_000, 1_000, 1_000, 5_000]


async def test_a_ring_between_looking_and_waiting_is_not_lost() -> None:
    bell = Bell()
    rung = bell.listen()
    bell.ring()
    await wait(rung, limit_seconds=3600)


async def test_waiting_ends_at_its_limit_without_a_ring() -> None:
    await wait(Bell().listen(), limit_seconds=0.001)
