"""Workers and their leases, inside a transaction.

Locks are taken in one order: worker, conversations, counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from services.kvmeta.deadlines import Policy
from services.kvmeta.model import (
    LIVE_STATES,
    HandleState,
    ReleaseCause,
    Retained,
    Worker,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.sql import releases
from services.kvmeta.sql.tables import (
    CONVERSATION_COLUMNS,
    REGISTRY_COUNTER,
    REGISTRY_FLOOR,
    conversation_from_row,
    conversations,
    counters,
    release_floors,
    worker_from_row,
    worker_to_row,
    workers,
)
from services.kvmeta.store import Forgotten, Renewal

_c = conversations.c
_w = workers.c
_LIVE = _c.state.in_([state.value for state in LIVE_STATES])
_HAS_LEASE = _w.removed.is_(sa.false())
_AT_LEAST = sa.bindparam("at_least", type_=sa.BigInteger)
_RAISE_FLOOR = (
    sa.update(counters)
    .where(counters.c.name == REGISTRY_FLOOR, counters.c.value < _AT_LEAST)
    .values(value=_AT_LEAST)
)
_UPDATE = sa.update(workers).where(_w.worker_id == sa.bindparam("key_worker_id"))


def register(
    connection: sa.Connection,
    worker: Worker,
    lease_id: str,
    lease_ttl_us: int,
    now_us: int,
    policy: Policy,
) -> int:
    """See RegistryStore.register."""
    known = _lock(connection, _w.worker_id == worker.worker_id)
    voided = _void(
        connection,
        sa.and_(
            _c.worker_id == worker.worker_id,
            sa.or_(_c.engine_id != worker.engine.engine_id, _c.epoch != worker.engine.epoch),
        ),
        now_us,
        policy,
    )
    revision = _next_revision(connection)
    record = WorkerRecord(
        worker=worker,
        lease_id=lease_id,
        lease_ttl_us=lease_ttl_us,
        lease_expire_us=now_us + lease_ttl_us,
        removed=False,
        added_revision=revision if known is None or known.removed else known.added_revision,
        revision=revision,
    )
    if known is None:
        connection.execute(sa.insert(workers), worker_to_row(record))
    else:
        _write(connection, record)
    return voided


def keep_alive(
    connection: sa.Connection, lease_id: str, state: WorkerState | None, now_us: int
) -> Renewal | None:
    """See RegistryStore.keep_alive."""
    known = _lock(connection, _w.lease_id == lease_id)
    if known is None or known.removed or known.lease_expire_us <= now_us:
        return None
    renewed = replace(known, lease_expire_us=now_us + known.lease_ttl_us)
    state_changed = state is not None and state is not known.worker.state
    if state is not None and state_changed:
        renewed = replace(
            renewed,
            worker=replace(known.worker, state=state),
            revision=_next_revision(connection),
        )
    _write(connection, renewed)
    return Renewal(known.lease_ttl_us, state_changed)


def end_lease(connection: sa.Connection, lease_id: str, now_us: int, policy: Policy) -> str | None:
    """See RegistryStore.end_lease."""
    known = _lock(connection, _w.lease_id == lease_id)
    if known is None or known.removed:
        return None
    _remove(connection, known, now_us, policy)
    return known.worker.worker_id


def end_leases(connection: sa.Connection, limit: int, now_us: int, policy: Policy) -> list[str]:
    """See RegistryStore.end_leases."""
    over = connection.execute(
        sa.select(workers)
        .where(_HAS_LEASE, _w.lease_expire_us <= now_us)
        .order_by(_w.worker_id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    records = [worker_from_row(row) for row in over.mappings()]
    for record in records:
        _remove(connection, record, now_us, policy)
    return [record.worker.worker_id for record in records]


def extend_leases(connection: sa.Connection, now_us: int) -> int:
    """See RegistryStore.extend_leases."""
    return connection.execute(
        sa.update(workers).where(_HAS_LEASE).values(lease_expire_us=now_us + _w.lease_ttl_us)
    ).rowcount


def forget(connection: sa.Connection, limit: int, now_us: int, policy: Policy) -> int:
    """See RegistryStore.forget_workers."""
    gone = connection.execute(
        sa.select(_w.worker_id, _w.revision)
        .where(
            _w.removed.is_(sa.true()),
            _w.lease_expire_us <= now_us - policy.dead_retention_us,
        )
        .order_by(_w.worker_id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    if gone:
        ids = [row.worker_id for row in gone]
        connection.execute(sa.delete(workers).where(_w.worker_id.in_(ids)))
        connection.execute(sa.delete(release_floors).where(release_floors.c.worker_id.in_(ids)))
        floor = max(row.revision for row in gone)
        connection.execute(_RAISE_FLOOR, {"at_least": floor})
    return len(gone)


def page(
    connection: sa.Connection,
    model: str | None,
    role: WorkerRole | None,
    after: str,
    limit: int,
    now_us: int,
) -> list[tuple[WorkerRecord, Retained]]:
    """See RegistryStore.workers."""
    query = sa.select(workers).where(_HAS_LEASE, _w.lease_expire_us > now_us, _w.worker_id > after)
    if model is not None:
        query = query.where(_w.model == model)
    if role is not None:
        query = query.where(_w.role == role.value)
    query = query.order_by(_w.worker_id).limit(limit)
    records = [worker_from_row(row) for row in connection.execute(query).mappings()]
    retained = _retained(connection, [record.worker.worker_id for record in records])
    return [
        (
            record,
            retained.get(
                (
                    record.worker.worker_id,
                    record.worker.engine.engine_id,
                    record.worker.engine.epoch,
                ),
                Retained(),
            ),
        )
        for record in records
    ]


def registry(connection: sa.Connection) -> tuple[int, list[WorkerRecord]]:
    """See RegistryStore.registry."""
    revision = releases.current_revision(connection, REGISTRY_COUNTER)
    rows = connection.execute(sa.select(workers).where(_HAS_LEASE).order_by(_w.worker_id))
    return revision, [worker_from_row(row) for row in rows.mappings()]


def changes(connection: sa.Connection, after_revision: int) -> list[WorkerRecord] | Forgotten:
    """See RegistryStore.worker_changes."""
    if after_revision > 0:
        floor = releases.current_revision(connection, REGISTRY_FLOOR)
        newest = releases.current_revision(connection, REGISTRY_COUNTER)
        if not floor <= after_revision <= newest:
            return Forgotten()
    rows = connection.execute(
        sa.select(workers).where(_w.revision > after_revision).order_by(_w.revision)
    )
    return [worker_from_row(row) for row in rows.mappings()]


def void_all(connection: sa.Connection, now_us: int, policy: Policy) -> int:
    """See LedgerStore.void_all."""
    return _void(connection, sa.true(), now_us, policy)


def _lock(connection: sa.Connection, which: sa.ColumnElement[bool]) -> WorkerRecord | None:
    query = sa.select(workers).where(which).with_for_update()
    row = connection.execute(query).mappings().one_or_none()
    return worker_from_row(row) if row else None


def _write(connection: sa.Connection, record: WorkerRecord) -> None:
    connection.execute(_UPDATE, {"key_worker_id": record.worker.worker_id, **worker_to_row(record)})


def _remove(connection: sa.Connection, record: WorkerRecord, now_us: int, policy: Policy) -> None:
    engine = record.worker.engine
    holds = sa.and_(
        _c.worker_id == record.worker.worker_id,
        _c.engine_id == engine.engine_id,
        _c.epoch == engine.epoch,
    )
    # The engine may live on without its lease: let it free what nobody can take.
    unused = _void_returning(
        connection, sa.and_(holds, _c.state == HandleState.AVAILABLE.value), now_us, policy
    )
    _void(connection, holds, now_us, policy)
    pairs = [(conversation_from_row(row), row.params_id) for row in unused]
    releases.write(connection, pairs, ReleaseCause.LEASE_ENDED, now_us, policy)
    removed = replace(
        record, removed=True, lease_expire_us=now_us, revision=_next_revision(connection)
    )
    _write(connection, removed)


def _voiding(which: sa.ColumnElement[bool], now_us: int, policy: Policy) -> sa.Update:
    return (
        sa.update(conversations)
        .where(which, _LIVE)
        .values(
            state=HandleState.VOID.value,
            due_time_us=now_us + policy.dead_retention_us,
            revision=sa.case((_c.revision >= now_us, _c.revision + 1), else_=now_us),
        )
    )


def _void(
    connection: sa.Connection, which: sa.ColumnElement[bool], now_us: int, policy: Policy
) -> int:
    return connection.execute(_voiding(which, now_us, policy)).rowcount


def _void_returning(
    connection: sa.Connection, which: sa.ColumnElement[bool], now_us: int, policy: Policy
) -> Sequence[sa.Row[Any]]:
    statement = _voiding(which, now_us, policy).returning(*CONVERSATION_COLUMNS, _c.params_id)
    return connection.execute(statement).all()


def _next_revision(connection: sa.Connection) -> int:
    return releases.next_revisions(connection, REGISTRY_COUNTER, 1)


def _retained(
    connection: sa.Connection, worker_ids: Sequence[str]
) -> dict[tuple[str, str, str], Retained]:
    rows = connection.execute(
        sa.select(
            _c.worker_id,
            _c.engine_id,
            _c.epoch,
            sa.func.count().label("conversations"),
            sa.func.sum(_c.num_blocks).label("blocks"),
        )
        .where(_c.worker_id.in_(worker_ids), _c.state == HandleState.AVAILABLE.value)
        .group_by(_c.worker_id, _c.engine_id, _c.epoch)
    )
    return {
        (row.worker_id, row.engine_id, row.epoch): Retained(row.conversations, int(row.blocks))
        for row in rows
    }
