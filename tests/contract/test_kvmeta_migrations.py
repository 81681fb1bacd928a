"""The migrations lead to the schema that the code uses."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from services.kvmeta.sql import schema
from services.kvmeta.sql.postgres import open_postgres
from services.kvmeta.sql.sqlite import open_sqlite
from services.kvmeta.sql.tables import counters, metadata
from services.kvmeta.sql.transactions import Transactions


@pytest.fixture(params=["sqlite", "postgres"])
async def transactions(request, tmp_path):
    """Transactions on a database without tables."""
    if request.param == "sqlite":
        opened: AbstractAsyncContextManager[Transactions] = open_sqlite(tmp_path / "ledger.db")
    else:
        server = request.getfixturevalue("postgres")
        opened = open_postgres(sa.make_url(server.url), pool_size=2)
    async with opened as made:
        await made.write(_drop_everything)
        yield made


def _drop_everything(connection: sa.Connection) -> None:
    found = sa.MetaData()
    found.reflect(connection)
    found.drop_all(connection)


def _differences(connection: sa.Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return list(compare_metadata(context, metadata))


async def test_migrations_equal_the_metadata(transactions) -> None:
    await transactions.write(schema.upgrade)
    assert await transactions.read(_differences) == []


async def test_the_comparison_notices_a_difference(transactions) -> None:
    await transactions.write(schema.upgrade)
    drop = sa.text("ALTER TABLE tenants DROP COLUMN conversations")
    await transactions.write(lambda connection: connection.execute(drop))
    assert await transactions.read(_differences) != []


async def test_migrating_again_changes_nothing(transactions) -> None:
    await transactions.write(schema.upgrade)
    revise = sa.update(counters).values(value=7)
    await transactions.write(lambda connection: connection.execute(revise))
    await transactions.write(schema.upgrade)
    values = sa.select(counters.c.name, counters.c.value).order_by(counters.c.name)
    rows = await transactions.read(lambda connection: connection.execute(values).all())
    assert [tuple(row) for row in rows] == [("registry", 7), ("releases", 7)]


def test_the_history_of_migrations_is_one_line() -> None:
    script = ScriptDirectory(str(schema.MIGRATIONS))
    assert len(script.get_heads()) == 1
    assert len(script.get_bases()) == 1
