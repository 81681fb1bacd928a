"""The thread that writes to SQLite: what it does when the database will not begin."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from kvloop.errors import UnavailableError
from services.kvmeta.sql.sqlite import SqliteTransactions, open_sqlite
from services.kvmeta.sql.tables import metadata, tenants


def insert(name: str):
    def work(connection: sa.Connection) -> str:
        connection.execute(sa.insert(tenants), {"tenant": name, "conversations": 1})
        return name

    return work


def names(connection: sa.Connection) -> set[str]:
    return set(connection.execute(sa.select(tenants.c.tenant)).scalars())


async def impatient(transactions: SqliteTransactions) -> list[str]:
    """Let its writer wait for locks only shortly; the statements it runs from now on."""
    statements: list[str] = []

    def change(connection: sa.Connection) -> None:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute("PRAGMA busy_timeout = 500")
        driver.set_trace_callback(statements.append)

    await transactions.write(change)
    statements.clear()
    return statements


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep others from writing, as another program does that holds the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


async def test_a_locked_database_is_waited_for_once_for_all(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with open_sqlite(path) as transactions:
        await transactions.write(metadata.create_all)
        statements = await impatient(transactions)
        with locked(path):
            outcomes = await asyncio.gather(
                *(transactions.write(insert(f"t{number}")) for number in range(10)),
                return_exceptions=True,
            )
            assert all(isinstance(outcome, UnavailableError) for outcome in outcomes)
            assert statements.count("BEGIN IMMEDIATE") == 1
        await transactions.write(insert("after"))
        assert await transactions.read(names) == {"after"}


async def test_nothing_is_begun_for_callers_that_have_all_gone(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "ledger.db") as transactions:
        await transactions.write(metadata.create_all)
        statements = await impatient(transactions)
        begun, gate = threading.Event(), threading.Event()

        def wait(_: sa.Connection) -> None:
            begun.set()
            gate.wait()

        async with asyncio.TaskGroup() as tasks:
            busy = tasks.create_task(transactions.write(wait))
            await asyncio.to_thread(begun.wait)
            gone = tasks.create_task(transactions.write(insert("gone")))
            await asyncio.sleep(0)  # handed over
            gone.cancel()
            gate.set()
            await busy
        await transactions.write(insert("kept"))
        assert await transactions.read(names) == {"kept"}
        assert statements.count("BEGIN IMMEDIATE") == 2


async def test_a_write_that_comes_too_late_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "ledger.db") as transactions:
        await transactions.write(metadata.create_all)
    with pytest.raises(RuntimeError, match="being closed"):
        await transactions.write(insert("late"))
