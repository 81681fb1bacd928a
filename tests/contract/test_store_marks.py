"""Both databases keep the ledger's time."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager

import pytest
import sqlalchemy as sa

from services.kvmeta.clock import Mark
from services.kvmeta.sql import schema
from services.kvmeta.sql.marks import SqlMarks
from services.kvmeta.sql.postgres import open_postgres
from services.kvmeta.sql.sqlite import open_sqlite
from services.kvmeta.sql.tables import ledger_clock
from services.kvmeta.sql.transactions import Transactions
from tests.contract.kvmeta_stores import ManualClock
from tests.unit.kvmeta.fake_host import FakeHost


@pytest.fixture
def host() -> FakeHost:
    """The machine's clocks."""
    return FakeHost()


@pytest.fixture(params=["sqlite", "postgres"])
async def marks(request, tmp_path, host):
    """Marks in an empty database."""
    shared = request.param == "postgres"
    if shared:
        server = request.getfixturevalue("postgres")
        opened: AbstractAsyncContextManager[Transactions] = open_postgres(
            sa.make_url(server.url), pool_size=2
        )
    else:
        opened = open_sqlite(tmp_path / "ledger.db")
    async with opened as transactions:
        await transactions.write(schema.upgrade)
        await transactions.write(lambda connection: connection.execute(sa.delete(ledger_clock)))
        yield SqlMarks(transactions, host, server_wall=shared)


async def test_there_is_no_mark_at_first(marks) -> None:
    mark, _ = await marks.load()
    assert mark is None


async def test_a_mark_holds_the_ledgers_time_and_the_clocks_beside_it(marks, host, clock) -> None:
    assert await marks.save(clock) == clock.us
    mark, now = await marks.load()
    assert mark.ledger_us == clock.us
    assert mark.reading.uptime_us == now.uptime_us == host.up_us
    assert mark.reading.boot_id == now.boot_id
    assert 0 <= now.wall_us - mark.reading.wall_us < 10_000_000


async def test_a_lower_time_does_not_replace_a_higher_one(marks, host, clock) -> None:
    await marks.save(clock)
    slower = ManualClock()
    slower.us = clock.us - 1
    host.advance(5)
    assert await marks.save(slower) == clock.us
    mark, _ = await marks.load()
    assert mark.ledger_us == clock.us
    assert mark.reading.uptime_us == host.up_us - 5_000_000
    clock.advance(5)
    assert await marks.save(clock) == clock.us


async def test_replicas_share_the_wall_clock_of_the_server(postgres, host, clock) -> None:
    async with open_postgres(sa.make_url(postgres.url), pool_size=2) as transactions:
        await transactions.write(schema.upgrade)
        marks = SqlMarks(transactions, host, server_wall=True)
        await marks.save(clock)
        mark, now = await marks.load()
    assert isinstance(mark, Mark)
    assert abs(now.wall_us - time.time_ns() // 1000) < 60_000_000
    assert now.boot_id == ""
