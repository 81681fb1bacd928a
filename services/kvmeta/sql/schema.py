"""Brings a database to the newest schema."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

MIGRATIONS = Path(__file__).parent.parent / "migrations"
_LOCK_KEY = 0x6B766C6F6F70  # "kvloop"


def upgrade(connection: sa.Connection, revision: str = "head") -> None:
    """Run the migrations that the database lacks, in the caller's transaction.

    Replicas that start together wait for the first of them.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SET LOCAL lock_timeout = 0"))
        connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
