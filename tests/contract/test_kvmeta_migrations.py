"""The migrations lead to the schema that the code uses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from services.kvmeta.sql import schema
from services.kvmeta.sql.tables import counters, metadata


def _differences(connection: sa.Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return list(compare_metadata(context, metadata))


async def test_migrations_equal_the_metadata(bare_database) -> None:
    await bare_database.write(schema.upgrade)
    assert await bare_database.read(_differences) == []


async def test_the_comparison_notices_a_difference(bare_database) -> None:
    await bare_database.write(schema.upgrade)
    drop = sa.text("ALTER TABLE tenants DROP COLUMN conversations")
    await bare_database.write(lambda connection: connection.execute(drop))
    assert await bare_database.read(_differences) != []


async def test_migrating_again_changes_nothing(bare_database) -> None:
    await bare_database.write(schema.upgrade)
    revise = sa.update(counters).values(value=7)
    await bare_database.write(lambda connection: connection.execute(revise))
    await bare_database.write(schema.upgrade)
    values = sa.select(counters.c.name, counters.c.value).order_by(counters.c.name)
    rows = await bare_database.read(lambda connection: connection.execute(values).all())
    assert [tuple(row) for row in rows] == [
        ("registry", 7),
        ("registry_floor", 7),
        ("releases", 7),
    ]


def test_the_history_of_migrations_is_one_line() -> None:
    script = ScriptDirectory(str(schema.MIGRATIONS))
    assert len(script.get_heads()) == 1
    assert len(script.get_bases()) == 1
