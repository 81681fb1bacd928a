"""The schema, and how its rows become values.

Times and durations are microseconds of the ledger's clock. Text sorts by code
point on every database, so that pages agree with the in-memory store. Params
have a table of their own: a conversation's row stays short, and changing its
state does not rewrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from services.kvmeta.model import (
    Conversation,
    ConversationKey,
    EngineRef,
    EngineTraits,
    Handle,
    HandleState,
    Release,
    ReleaseCause,
    Worker,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)


def _text(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def _integer(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


# A rowid on SQLite needs the plain integer type.
_SURROGATE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

conversations = sa.Table(
    "conversations",
    metadata,
    sa.Column("tenant", _text(128), primary_key=True),
    sa.Column("model", _text(256), primary_key=True),
    sa.Column("conversation_id", _text(256), primary_key=True),
    _integer("issued_turn"),
    _integer("ended_turn"),
    sa.Column("conversation_ttl_us", sa.BigInteger, nullable=True),
    sa.Column("state", _text(16), nullable=False),
    sa.Column("release_cause", _text(16), nullable=True),
    _integer("turn"),
    sa.Column("handle_id", _text(64), nullable=False),
    sa.Column("worker_id", _text(128), nullable=False),
    sa.Column("engine_id", _text(256), nullable=False),
    sa.Column("epoch", _text(64), nullable=False),
    _integer("num_tokens"),
    _integer("num_blocks"),
    sa.Column("take_request_id", _text(64), nullable=False),
    _integer("take_turn"),
    sa.Column("commit_request_id", _text(64), nullable=False),
    _integer("commit_revision"),
    _integer("commit_time_us"),
    _integer("expire_time_us"),
    _integer("engine_ttl_us"),
    _integer("retention_ttl_us"),
    _integer("drop_time_us"),
    _integer("deadline_extension_us"),
    _integer("due_time_us"),
    _integer("revision"),
    sa.Column("params_id", sa.BigInteger, nullable=True),
    sa.Index("ix_conversations_due_time_us", "due_time_us"),
    sa.Index("ix_conversations_worker_id_engine_id_epoch", "worker_id", "engine_id", "epoch"),
    sa.Index("ix_conversations_commit_request_id", "commit_request_id"),
    sa.Index("ix_conversations_tenant_commit_time_us", "tenant", "commit_time_us"),
)

# Deleted once due, well after the engine has dropped the blocks by itself.
handle_params = sa.Table(
    "handle_params",
    metadata,
    sa.Column("params_id", _SURROGATE, primary_key=True, autoincrement=True),
    sa.Column("params", sa.LargeBinary, nullable=False),
    _integer("due_time_us"),
    sa.Index("ix_handle_params_due_time_us", "due_time_us"),
)

releases = sa.Table(
    "releases",
    metadata,
    sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("worker_id", _text(128), nullable=False),
    sa.Column("engine_id", _text(256), nullable=False),
    sa.Column("epoch", _text(64), nullable=False),
    sa.Column("handle_id", _text(64), nullable=False),
    _integer("turn"),
    sa.Column("params_id", sa.BigInteger, nullable=True),
    _integer("num_tokens"),
    _integer("num_blocks"),
    sa.Column("cause", _text(16), nullable=False),
    _integer("deadline_extension_us"),
    _integer("due_time_us"),
    sa.Index("ix_releases_worker_id_revision", "worker_id", "revision"),
    sa.Index("ix_releases_due_time_us", "due_time_us"),
)

# The highest revision deleted from releases, per worker.
release_floors = sa.Table(
    "release_floors",
    metadata,
    sa.Column("worker_id", _text(128), primary_key=True),
    _integer("revision"),
)

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("worker_id", _text(128), primary_key=True),
    sa.Column("role", _text(16), nullable=False),
    sa.Column("address", _text(512), nullable=False),
    sa.Column("model", _text(256), nullable=False),
    sa.Column("engine_id", _text(256), nullable=False),
    sa.Column("epoch", _text(64), nullable=False),
    sa.Column("traits", sa.JSON, nullable=False),
    sa.Column("state", _text(16), nullable=False),
    sa.Column("lease_id", _text(64), nullable=False, unique=True),
    _integer("lease_ttl_us"),
    _integer("lease_expire_us"),
    sa.Column("removed", sa.Boolean, nullable=False),
    _integer("added_revision"),
    _integer("revision"),
)

# How many rows each tenant has in conversations, so that its limit is exact and
# cheap: only a first commit and the sweeper write here.
tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("tenant", _text(128), primary_key=True),
    _integer("conversations"),
)

# Revisions. A change holds its counter's row until it is committed, so that
# revisions become visible in their order.
counters = sa.Table(
    "counters",
    metadata,
    sa.Column("name", _text(32), primary_key=True),
    _integer("value"),
)

# One row: the ledger's time and the clocks beside it.
ledger_clock = sa.Table(
    "ledger_clock",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    _integer("ledger_us"),
    _integer("wall_us"),
    sa.Column("boot_id", _text(64), nullable=False),
    _integer("uptime_us"),
)

RELEASES_COUNTER = "releases"
REGISTRY_COUNTER = "registry"
REGISTRY_FLOOR = "registry_floor"
"""The highest revision at which a worker changed that was deleted since."""

CONVERSATION_COLUMNS = tuple(c for c in conversations.c if c.name != "params_id")
"""In the order of Conversation's fields, with its key and engine in parts."""


def conversation_from_row(row: Sequence[Any]) -> Conversation:
    """A row that begins with CONVERSATION_COLUMNS as a value."""
    (
        tenant,
        model,
        conversation_id,
        issued_turn,
        ended_turn,
        conversation_ttl_us,
        state,
        release_cause,
        turn,
        handle_id,
        worker_id,
        engine_id,
        epoch,
        *rest,
    ) = row[: len(CONVERSATION_COLUMNS)]
    return Conversation(
        ConversationKey(tenant, model, conversation_id),
        issued_turn,
        ended_turn,
        conversation_ttl_us,
        HandleState(state),
        None if release_cause is None else ReleaseCause(release_cause),
        turn,
        handle_id,
        worker_id,
        EngineRef(engine_id, epoch),
        *rest,
    )


def conversation_to_row(value: Conversation) -> dict[str, Any]:
    """The columns of `conversations` for a value, its key and params left out."""
    return {
        "issued_turn": value.issued_turn,
        "ended_turn": value.ended_turn,
        "conversation_ttl_us": value.conversation_ttl_us,
        "state": value.state.value,
        "release_cause": None if value.release_cause is None else value.release_cause.value,
        "turn": value.turn,
        "handle_id": value.handle_id,
        "worker_id": value.worker_id,
        "engine_id": value.engine.engine_id,
        "epoch": value.engine.epoch,
        "num_tokens": value.num_tokens,
        "num_blocks": value.num_blocks,
        "take_request_id": value.take_request_id,
        "take_turn": value.take_turn,
        "commit_request_id": value.commit_request_id,
        "commit_revision": value.commit_revision,
        "commit_time_us": value.commit_time_us,
        "expire_time_us": value.expire_time_us,
        "engine_ttl_us": value.engine_ttl_us,
        "retention_ttl_us": value.retention_ttl_us,
        "drop_time_us": value.drop_time_us,
        "deadline_extension_us": value.deadline_extension_us,
        "due_time_us": value.due_time_us,
        "revision": value.revision,
    }


def release_from_row(row: RowMapping) -> Release:
    """A row of `releases`, joined with its params, as a value."""
    return Release(
        revision=row["revision"],
        handle=Handle(
            handle_id=row["handle_id"],
            worker_id=row["worker_id"],
            engine=EngineRef(row["engine_id"], row["epoch"]),
            turn=row["turn"],
            params=row["params"],
            num_tokens=row["num_tokens"],
            num_blocks=row["num_blocks"],
            deadline_extension_us=row["deadline_extension_us"],
        ),
        cause=ReleaseCause(row["cause"]),
    )


def worker_from_row(row: RowMapping) -> WorkerRecord:
    """A row of `workers` as a value."""
    return WorkerRecord(
        worker=Worker(
            worker_id=row["worker_id"],
            role=WorkerRole(row["role"]),
            address=row["address"],
            model=row["model"],
            engine=EngineRef(row["engine_id"], row["epoch"]),
            traits=EngineTraits(**row["traits"]),
            state=WorkerState(row["state"]),
        ),
        lease_id=row["lease_id"],
        lease_ttl_us=row["lease_ttl_us"],
        lease_expire_us=row["lease_expire_us"],
        removed=row["removed"],
        added_revision=row["added_revision"],
        revision=row["revision"],
    )


def worker_to_row(value: WorkerRecord) -> dict[str, Any]:
    """The columns of `workers` for a value."""
    worker = value.worker
    return {
        "worker_id": worker.worker_id,
        "role": worker.role.value,
        "address": worker.address,
        "model": worker.model,
        "engine_id": worker.engine.engine_id,
        "epoch": worker.engine.epoch,
        "traits": asdict(worker.traits),
        "state": worker.state.value,
        "lease_id": value.lease_id,
        "lease_ttl_us": value.lease_ttl_us,
        "lease_expire_us": value.lease_expire_us,
        "removed": value.removed,
        "added_revision": value.added_revision,
        "revision": value.revision,
    }
