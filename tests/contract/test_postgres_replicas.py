"""Several kvmeta processes on one PostgreSQL, and PostgreSQL going away."""

from __future__ import annotations

import asyncio
import time

import pytest
import sqlalchemy as sa

from kvloop.errors import UnavailableError
from services.kvmeta.model import EngineRef, MissReason
from services.kvmeta.sql import schema
from services.kvmeta.sql.postgres import open_postgres
from services.kvmeta.store import Hit
from tests.contract.kvmeta_stores import (
    POLICY,
    START_US,
    commit,
    hit,
    key,
    miss,
    open_postgres_store,
    register,
    stored,
    worker,
)
from tests.contract.postgres_server import private_server


@pytest.fixture
async def replicas(postgres, clock):
    """Two stores on one database."""
    async with (
        open_postgres_store(postgres.url, clock, POLICY) as one,
        open_postgres_store(postgres.url, clock, POLICY, empty=False) as two,
    ):
        yield one, two


async def test_takers_at_two_replicas_share_each_handle_out_once(replicas) -> None:
    one = replicas[0]
    await register(one)
    names = [f"c-{number}" for number in range(10)]
    for name in names:
        await stored(one, commit(key(name), request_id=name))
    for name in names:
        # As many as have a connection: none waits so long for one that it is turned away.
        takes = [
            store.take(key(name), f"{name}-{number}-{id(store)}")
            for number in range(8)
            for store in replicas
        ]
        hits = [each for each in await asyncio.gather(*takes) if isinstance(each, Hit)]
        assert [each.conversation.key.conversation_id for each in hits] == [name]


async def test_a_commit_at_one_replica_is_taken_at_the_other(replicas) -> None:
    one, two = replicas
    await register(one)
    await stored(two, commit(params=b"p"))
    assert (await hit(one)).params == b"p"
    assert (await miss(two, request_id="r3")).reason is MissReason.TAKEN


async def test_replicas_share_a_sweep_without_double_work(replicas, clock) -> None:
    one, two = replicas
    await register(one)
    for number in range(30):
        await stored(one, commit(key(f"c-{number}"), request_id=f"r{number}"))
    clock.advance(475)
    swept = await asyncio.gather(*(store.sweep(4) for _ in range(6) for store in replicas))
    while (more := await one.sweep(4)).expired:
        swept.append(more)
    assert sum(each.expired for each in swept) == 30
    releases = await two.releases("d1", 0, 100)
    assert len({release.handle.handle_id for release in releases}) == 30


async def test_releases_written_at_two_replicas_become_visible_in_their_order(replicas) -> None:
    one, two = replicas
    await register(one)
    seen: list[int] = []
    done = asyncio.Event()

    async def watch() -> None:
        while not done.is_set() or await one.releases("d1", seen[-1] if seen else 0, 100):
            found = await one.releases("d1", seen[-1] if seen else 0, 100)
            seen.extend(release.revision for release in found)

    async def write(store, name: str) -> None:
        for turn in range(1, 21):
            await stored(store, commit(key(name), turn=turn, request_id=f"{name}-{turn}"))

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        async with asyncio.TaskGroup() as writers:
            for number, store in enumerate([one, two, one, two]):
                writers.create_task(write(store, f"c-{number}"))
        done.set()
    assert seen == sorted(seen)
    assert len(seen) == 4 * 19  # none was missed


async def test_first_registrations_of_one_worker_at_two_replicas_leave_one(replicas) -> None:
    engines = [EngineRef("e", f"epoch-{number}") for number in range(8)]
    await asyncio.gather(
        *(
            replicas[number % 2].register(worker(engine=engine), f"lease-{number}", 10**9)
            for number, engine in enumerate(engines)
        )
    )
    _, records = await replicas[0].registry()
    assert len(records) == 1
    changes = await replicas[1].worker_changes(0)
    assert [record.revision for record in changes] == [START_US + 8]


async def test_a_commit_races_a_new_engine_life_and_is_never_given_out(replicas) -> None:
    one, two = replicas
    for number in range(10):
        old, new = EngineRef("e", f"old-{number}"), EngineRef("e", f"new-{number}")
        await register(one, worker(engine=old))
        at = key(f"c-{number}")
        await asyncio.gather(
            one.commit(commit(at, engine=old, request_id=f"r{number}"), f"h{number}"),
            two.register(worker(engine=new), f"lease-{number}", 10**9),
        )
        assert (await miss(one, at, "taker")).reason in (MissReason.VOID, MissReason.FIRST_TURN)


async def test_an_outage_of_postgresql_is_told_at_once_and_survived(clock) -> None:
    with private_server() as server:
        if server is None:
            pytest.skip("PostgreSQL is not installed")
        async with open_postgres_store(server.url, clock, POLICY) as store:
            await register(store)
            await stored(store, commit(params=b"p"))
            await asyncio.to_thread(server.stop, "immediate")
            for _ in range(10):
                began = time.monotonic()
                with pytest.raises(UnavailableError) as caught:
                    await store.take(key(), "r2")
                assert caught.value.reason == "DATABASE_UNAVAILABLE"
                assert time.monotonic() - began < 30  # connecting may take 60 s
            with pytest.raises(UnavailableError):
                await store.get(key())
            await asyncio.to_thread(server.start)
            # Connections that broke are found out one by one at most.
            for _ in range(8):
                try:
                    taken = await hit(store)
                    break
                except UnavailableError:
                    continue
            assert taken.params == b"p"
            assert taken.conversation == await store.get(key())


async def test_replicas_that_start_together_migrate_once(postgres) -> None:
    async def start(name: str) -> None:
        url = sa.make_url(postgres.url).set(database=name)
        async with open_postgres(url, pool_size=1) as transactions:
            await transactions.write(schema.upgrade)

    async with open_postgres(sa.make_url(postgres.url), pool_size=1) as admin:
        autocommit = admin._engine.execution_options(isolation_level="AUTOCOMMIT")
        async with autocommit.connect() as connection:
            await connection.execute(sa.text("DROP DATABASE IF EXISTS together"))
            await connection.execute(sa.text("CREATE DATABASE together"))
    await asyncio.gather(*(start("together") for _ in range(4)))
