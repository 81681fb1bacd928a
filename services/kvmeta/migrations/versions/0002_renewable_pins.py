"""Renewable pins, evicted handles, and resuming the registry's watchers.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_COUNTERS = sa.table("counters", sa.column("name", sa.String), sa.column("value", sa.BigInteger))

# What each new column is in a row of the schema before: pins were not renewable,
# a handle was RELEASED by the end of its conversation alone, and a live worker
# was last seen new at its last change.
_OLD_ROWS = {
    "conversations": {
        "retention_ttl_us": "0",
        "drop_time_us": "commit_time_us + engine_ttl_us",
        "deadline_extension_us": "0",
    },
    "releases": {"deadline_extension_us": "0"},
    "workers": {"added_revision": "revision"},
}


def _text(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def upgrade() -> None:
    """Add the columns, fill them for old rows, and find rows by the committing turn."""
    op.add_column("conversations", sa.Column("release_cause", _text(16), nullable=True))
    op.execute("UPDATE conversations SET release_cause = 'ENDED' WHERE state = 'RELEASED'")
    for table, columns in _OLD_ROWS.items():
        for name in columns:
            op.add_column(table, sa.Column(name, sa.BigInteger(), nullable=True))
        values = ", ".join(f"{name} = {value}" for name, value in columns.items())
        op.execute(f"UPDATE {table} SET {values}")
        with op.batch_alter_table(table) as batch:
            for name in columns:
                batch.alter_column(name, existing_type=sa.BigInteger(), nullable=False)
    op.create_index("ix_conversations_commit_request_id", "conversations", ["commit_request_id"])
    _start_registry_floor()


def _start_registry_floor() -> None:
    """Workers that were deleted until now left no trace: watchers of before start anew."""
    connection = op.get_bind()
    newest = sa.select(_COUNTERS.c.value).where(_COUNTERS.c.name == "registry")
    value = connection.execute(newest).scalar_one()
    op.bulk_insert(_COUNTERS, [{"name": "registry_floor", "value": value}])
