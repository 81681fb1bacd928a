"""What both databases promise to the functions that run inside a transaction."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import sqlalchemy as sa

from kvloop.errors import UnavailableError
from services.kvmeta.sql import schema
from services.kvmeta.sql.postgres import open_postgres
from services.kvmeta.sql.sqlite import open_sqlite
from services.kvmeta.sql.tables import metadata, tenants
from services.kvmeta.sql.transactions import Transactions


@pytest.fixture(params=["sqlite", "postgres"])
async def transactions(request, tmp_path):
    """Transactions on an empty `tenants` table."""
    if request.param == "sqlite":
        opened: AbstractAsyncContextManager[Transactions] = open_sqlite(tmp_path / "ledger.db")
    else:
        server = request.getfixturevalue("postgres")
        opened = open_postgres(sa.make_url(server.url), pool_size=4)
    async with opened as made:
        await made.write(schema.upgrade)
        await made.write(lambda connection: connection.execute(sa.delete(tenants)))
        yield made


def insert(name: str, count: int = 1):
    def work(connection: sa.Connection) -> str:
        connection.execute(sa.insert(tenants), {"tenant": name, "conversations": count})
        return name

    return work


def names(connection: sa.Connection) -> set[str]:
    return set(connection.execute(sa.select(tenants.c.tenant)).scalars())


async def test_an_answer_comes_after_the_change_can_be_read(transactions) -> None:
    assert await transactions.write(insert("a")) == "a"
    assert await transactions.read(names) == {"a"}


async def test_work_that_raises_changes_nothing_and_harms_no_other(transactions) -> None:
    def insert_and_fail(connection: sa.Connection) -> None:
        insert("bad")(connection)
        raise ValueError("a defect")

    outcomes = await asyncio.gather(
        transactions.write(insert("a")),
        transactions.write(insert_and_fail),
        transactions.write(insert("b")),
        return_exceptions=True,
    )
    assert [outcomes[0], outcomes[2]] == ["a", "b"]
    assert isinstance(outcomes[1], ValueError)
    assert await transactions.read(names) == {"a", "b"}


async def test_a_cancelled_caller_leaves_a_whole_change_or_none(transactions) -> None:
    def two_inserts(name: str):
        def work(connection: sa.Connection) -> None:
            insert(f"{name}-1")(connection)
            insert(f"{name}-2")(connection)

        return work

    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(transactions.write(two_inserts(f"t{number}"))) for number in range(20)
        ]
        for yields, call in enumerate(calls):
            for _ in range(yields):
                await asyncio.sleep(0)
            call.cancel()
    await transactions.write(insert("last"))  # everything before it has settled
    found = await transactions.read(names) - {"last"}
    halves = [name.rsplit("-", 1)[0] for name in found]
    assert all(halves.count(name) == 2 for name in halves)
    for number, call in enumerate(calls):
        if not call.cancelled():
            assert f"t{number}" in halves


async def test_a_read_sees_one_snapshot(transactions) -> None:
    await transactions.write(insert("a"))
    loop = asyncio.get_running_loop()
    first_read, second_write = asyncio.Event(), []

    def read_twice(connection: sa.Connection) -> list[set[str]]:
        before = names(connection)
        loop.call_soon_threadsafe(first_read.set)
        for _ in range(200):  # meanwhile the write below is committed
            connection.execute(sa.select(sa.literal(1)))
        return [before, names(connection)]

    async def write_between() -> None:
        await first_read.wait()
        second_write.append(await transactions.write(insert("b")))

    seen, _ = await asyncio.gather(transactions.read(read_twice), write_between())
    assert seen == [{"a"}, {"a"}]
    assert await transactions.read(names) == {"a", "b"}


async def test_concurrent_increments_are_all_counted(transactions) -> None:
    await transactions.write(insert("a", 0))
    more = sa.update(tenants).values(conversations=tenants.c.conversations + 1)
    await asyncio.gather(
        *(transactions.write(lambda connection: connection.execute(more)) for _ in range(50))
    )
    count = sa.select(tenants.c.conversations)
    assert await transactions.read(lambda connection: connection.execute(count).scalar()) == 50


async def test_sqlite_commits_what_is_waiting_in_one_transaction(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "ledger.db") as transactions:
        await transactions.write(metadata.create_all)
        statements: list[str] = []

        def note_statements(connection: sa.Connection) -> None:
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.set_trace_callback(statements.append)

        await transactions.write(note_statements)
        await asyncio.gather(*(transactions.write(insert(f"t{n}")) for n in range(100)))
        assert len(await transactions.read(names)) == 100
        assert 2 <= statements.count("COMMIT") < 20  # with the one that began the notes


async def test_sqlite_goes_on_after_a_commit_that_failed(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "ledger.db") as transactions:
        await transactions.write(metadata.create_all)
        with pytest.raises(sqlite3.OperationalError, match="no transaction is active"):
            await transactions.write(lambda connection: connection.exec_driver_sql("ROLLBACK"))
        await transactions.write(insert("a"))
        assert await transactions.read(names) == {"a"}


async def test_sqlite_drops_work_whose_caller_left_before_its_turn(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "ledger.db") as transactions:
        await transactions.write(metadata.create_all)
        gate = threading.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(transactions.write(lambda connection: gate.wait()))
            dropped = group.create_task(transactions.write(insert("dropped")))
            group.create_task(transactions.write(insert("kept")))
            await asyncio.sleep(0)  # all of them are handed over
            dropped.cancel()
            gate.set()
        assert await transactions.read(names) == {"kept"}


async def test_two_writers_of_one_sqlite_file_lose_no_update(tmp_path: Path) -> None:
    def read_then_write(connection: sa.Connection) -> None:
        count = connection.execute(sa.select(tenants.c.conversations)).scalar_one()
        connection.execute(sa.update(tenants).values(conversations=count + 1))

    path = tmp_path / "ledger.db"
    async with open_sqlite(path) as one, open_sqlite(path) as two:
        await one.write(metadata.create_all)
        await one.write(insert("a", 0))
        for _ in range(20):
            await asyncio.gather(one.write(read_then_write), two.write(read_then_write))
        count = sa.select(tenants.c.conversations)
        assert await one.read(lambda connection: connection.execute(count).scalar()) == 40


async def test_sqlite_finishes_waiting_writes_when_it_closes(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as group:
        async with open_sqlite(tmp_path / "ledger.db") as transactions:
            await transactions.write(metadata.create_all)
            for number in range(50):
                group.create_task(transactions.write(insert(f"t{number}")))
            await asyncio.sleep(0)  # all of them are handed over
    async with open_sqlite(tmp_path / "ledger.db") as transactions:
        assert len(await transactions.read(names)) == 50


async def test_a_database_file_that_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "missing" / "ledger.db") as transactions:
        with pytest.raises(UnavailableError) as caught:
            await transactions.write(insert("a"))
        assert caught.value.reason == "DATABASE_UNAVAILABLE"
        with pytest.raises(UnavailableError):
            await transactions.read(names)


async def test_a_defect_in_a_statement_is_not_taken_for_an_outage(transactions) -> None:
    def wrong(connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT * FROM no_such_table"))

    with pytest.raises(sa.exc.DBAPIError):
        await transactions.write(wrong)
