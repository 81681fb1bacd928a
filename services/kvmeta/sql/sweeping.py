"""Bounded sweeps, inside a transaction.

Rows are locked with SKIP LOCKED, so replicas that sweep at the same time get
different ones. On SQLite the transaction itself is the lock.
"""

from __future__ import annotations

from collections import Counter

import sqlalchemy as sa

from services.kvmeta import rules
from services.kvmeta.deadlines import Policy
from services.kvmeta.model import Conversation, HandleState, ReleaseCause
from services.kvmeta.sql import releases
from services.kvmeta.sql.guards import THIS, this
from services.kvmeta.sql.tables import (
    CONVERSATION_COLUMNS,
    conversation_from_row,
    conversations,
    handle_params,
    release_floors,
    tenants,
)
from services.kvmeta.sql.tables import releases as releases_table
from services.kvmeta.store import Swept

_c = conversations.c
_BY = sa.bindparam("by_now", type_=sa.BigInteger)
_AT_MOST = sa.bindparam("at_most", type_=sa.Integer)
_DUE = (
    sa.select(*CONVERSATION_COLUMNS, _c.params_id)
    .where(_c.due_time_us <= _BY)
    .order_by(_c.due_time_us)
    .limit(_AT_MOST)
    .with_for_update(skip_locked=True)
)
_UPDATE = sa.update(conversations).where(THIS)
_DELETE = sa.delete(conversations).where(THIS)
_COUNT_FEWER = (
    sa.update(tenants)
    .where(tenants.c.tenant == sa.bindparam("key_tenant"))
    .values(conversations=tenants.c.conversations - sa.bindparam("fewer", type_=sa.BigInteger))
)
_r = releases_table.c
_DUE_RELEASES = (
    sa.select(_r.revision, _r.worker_id)
    .where(_r.due_time_us <= _BY)
    .order_by(_r.due_time_us, _r.revision)
    .limit(_AT_MOST)
    .with_for_update(skip_locked=True)
)
_DELETE_RELEASE = sa.delete(releases_table).where(_r.revision == sa.bindparam("key_revision"))
_RAISE_FLOOR = (
    sa.update(release_floors)
    .where(release_floors.c.worker_id == sa.bindparam("of_worker"))
    .values(
        revision=sa.case(
            (
                release_floors.c.revision < sa.bindparam("at_least", type_=sa.BigInteger),
                sa.bindparam("at_least", type_=sa.BigInteger),
            ),
            else_=release_floors.c.revision,
        )
    )
)
_p = handle_params.c
_DUE_PARAMS = (
    sa.select(_p.params_id)
    .where(_p.due_time_us <= _BY)
    .order_by(_p.due_time_us)
    .limit(_AT_MOST)
    .with_for_update(skip_locked=True)
)
_DELETE_PARAMS = sa.delete(handle_params).where(_p.params_id == sa.bindparam("key_params_id"))


def sweep(connection: sa.Connection, limit: int, now_us: int, policy: Policy) -> Swept:
    """See LedgerStore.sweep."""
    due = connection.execute(_DUE, {"by_now": now_us, "at_most": limit}).all()
    expired: list[tuple[Conversation, int | None]] = []
    changes: list[dict[str, object]] = []
    forgotten: list[Conversation] = []
    spent = 0
    for row in due:
        old = conversation_from_row(row)
        new = rules.swept(old, now_us, policy)
        if new is None:
            forgotten.append(old)
            continue
        changes.append(
            {
                **this(new.key),
                "state": new.state.value,
                "due_time_us": new.due_time_us,
                "revision": new.revision,
            }
        )
        if new.state is HandleState.EXPIRED:
            expired.append((old, row.params_id))
        else:
            spent += 1
    if changes:
        connection.execute(_UPDATE, changes)
    _forget(connection, forgotten)
    releases.write(connection, expired, ReleaseCause.EXPIRED, now_us, policy)
    return Swept(len(expired), spent, len(forgotten), more=len(due) == limit)


def forget_releases(connection: sa.Connection, limit: int, now_us: int) -> bool:
    """See LedgerStore.forget_releases."""
    bounds = {"by_now": now_us, "at_most": limit}
    due = connection.execute(_DUE_RELEASES, bounds).all()
    if due:
        connection.execute(_DELETE_RELEASE, [{"key_revision": row.revision} for row in due])
    floors: dict[str, int] = {}
    for row in due:
        floors[row.worker_id] = max(row.revision, floors.get(row.worker_id, 0))
    for worker_id, floor in sorted(floors.items()):
        if connection.execute(_RAISE_FLOOR, {"of_worker": worker_id, "at_least": floor}).rowcount:
            continue
        connection.execute(sa.insert(release_floors), {"worker_id": worker_id, "revision": floor})
    params = connection.execute(_DUE_PARAMS, bounds).scalars().all()
    if params:
        connection.execute(_DELETE_PARAMS, [{"key_params_id": each} for each in params])
    return limit in (len(due), len(params))


def _forget(connection: sa.Connection, forgotten: list[Conversation]) -> None:
    if not forgotten:
        return
    connection.execute(_DELETE, [this(row.key) for row in forgotten])
    per_tenant = Counter(row.key.tenant for row in forgotten)
    for tenant, fewer in sorted(per_tenant.items()):
        connection.execute(_COUNT_FEWER, {"key_tenant": tenant, "fewer": fewer})
