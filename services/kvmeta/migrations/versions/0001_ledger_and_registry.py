"""Ledger and registry.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _text(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def _column(name: str, kind: sa.types.TypeEngine[Any]) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


def _integer(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def upgrade() -> None:
    """Make all tables, and start the revisions at 0."""
    op.create_table(
        "conversations",
        _column("tenant", _text(128)),
        _column("model", _text(256)),
        _column("conversation_id", _text(256)),
        _integer("issued_turn"),
        _integer("ended_turn"),
        sa.Column("conversation_ttl_us", sa.BigInteger(), nullable=True),
        _column("state", _text(16)),
        _integer("turn"),
        _column("handle_id", _text(64)),
        _column("worker_id", _text(128)),
        _column("engine_id", _text(256)),
        _column("epoch", _text(64)),
        _integer("num_tokens"),
        _integer("num_blocks"),
        _column("take_request_id", _text(64)),
        _integer("take_turn"),
        _column("commit_request_id", _text(64)),
        _integer("commit_revision"),
        _integer("commit_time_us"),
        _integer("expire_time_us"),
        _integer("engine_ttl_us"),
        _integer("due_time_us"),
        _integer("revision"),
        sa.Column("params_id", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("tenant", "model", "conversation_id", name="pk_conversations"),
    )
    op.create_index("ix_conversations_due_time_us", "conversations", ["due_time_us"])
    op.create_index(
        "ix_conversations_worker_id_engine_id_epoch",
        "conversations",
        ["worker_id", "engine_id", "epoch"],
    )
    op.create_index(
        "ix_conversations_tenant_commit_time_us", "conversations", ["tenant", "commit_time_us"]
    )
    op.create_table(
        "handle_params",
        sa.Column(
            "params_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        _column("params", sa.LargeBinary()),
        _integer("due_time_us"),
        sa.PrimaryKeyConstraint("params_id", name="pk_handle_params"),
    )
    op.create_index("ix_handle_params_due_time_us", "handle_params", ["due_time_us"])
    op.create_table(
        "releases",
        sa.Column("revision", sa.BigInteger(), autoincrement=False, nullable=False),
        _column("worker_id", _text(128)),
        _column("engine_id", _text(256)),
        _column("epoch", _text(64)),
        _column("handle_id", _text(64)),
        _integer("turn"),
        sa.Column("params_id", sa.BigInteger(), nullable=True),
        _integer("num_tokens"),
        _integer("num_blocks"),
        _column("cause", _text(16)),
        _integer("due_time_us"),
        sa.PrimaryKeyConstraint("revision", name="pk_releases"),
    )
    op.create_index("ix_releases_worker_id_revision", "releases", ["worker_id", "revision"])
    op.create_index("ix_releases_due_time_us", "releases", ["due_time_us"])
    op.create_table(
        "release_floors",
        _column("worker_id", _text(128)),
        _integer("revision"),
        sa.PrimaryKeyConstraint("worker_id", name="pk_release_floors"),
    )
    op.create_table(
        "workers",
        _column("worker_id", _text(128)),
        _column("role", _text(16)),
        _column("address", _text(512)),
        _column("model", _text(256)),
        _column("engine_id", _text(256)),
        _column("epoch", _text(64)),
        _column("traits", sa.JSON()),
        _column("state", _text(16)),
        _column("lease_id", _text(64)),
        _integer("lease_ttl_us"),
        _integer("lease_expire_us"),
        _column("removed", sa.Boolean()),
        _integer("revision"),
        sa.PrimaryKeyConstraint("worker_id", name="pk_workers"),
        sa.UniqueConstraint("lease_id", name="uq_workers_lease_id"),
    )
    op.create_table(
        "tenants",
        _column("tenant", _text(128)),
        _integer("conversations"),
        sa.PrimaryKeyConstraint("tenant", name="pk_tenants"),
    )
    counters = op.create_table(
        "counters",
        _column("name", _text(32)),
        _integer("value"),
        sa.PrimaryKeyConstraint("name", name="pk_counters"),
    )
    op.bulk_insert(counters, [{"name": "releases", "value": 0}, {"name": "registry", "value": 0}])
    op.create_table(
        "ledger_clock",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        _integer("ledger_us"),
        _integer("wall_us"),
        _column("boot_id", _text(64)),
        _integer("uptime_us"),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_clock"),
    )
