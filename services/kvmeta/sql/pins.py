"""Pins, inside a transaction: what the rows say of what workers hold.

Answering is reading: it locks nothing and runs beside takes. A change is written
afterwards, and only if the row is still at the revision that was read. Otherwise
somebody was faster, and the worker's next question will see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sqlalchemy as sa

from services.kvmeta import pin_rules
from services.kvmeta.deadlines import Policy
from services.kvmeta.model import (
    LIVE_STATES,
    Conversation,
    EngineRef,
    HandleState,
    HeldPin,
    PinStatus,
    PinVerdict,
    ReleaseCause,
    RetainedPin,
)
from services.kvmeta.rules import EngineGone
from services.kvmeta.sql import releases
from services.kvmeta.sql.guards import THIS, engine_alive, this
from services.kvmeta.sql.tables import (
    CONVERSATION_COLUMNS,
    conversation_from_row,
    conversation_to_row,
    conversations,
    worker_from_row,
    workers,
)
from services.kvmeta.store import PinFilter, PinPosition, PinsChecked

_c = conversations.c
_WORKER = sa.bindparam("by_worker", type_=sa.String)
_ENGINE = sa.bindparam("by_engine", type_=sa.String)
_EPOCH = sa.bindparam("by_epoch", type_=sa.String)
_IS_ALIVE = sa.select(engine_alive(_WORKER, _ENGINE, _EPOCH))
_HELD = (
    sa.select(*CONVERSATION_COLUMNS, _c.params_id)
    .where(
        _c.commit_request_id.in_(sa.bindparam("by_turns", expanding=True)),
        _c.worker_id == _WORKER,
        _c.engine_id == _ENGINE,
        _c.epoch == _EPOCH,
    )
    # Calls that lock many rows lock them in one order.
    .order_by(_c.tenant, _c.model, _c.conversation_id)
)
_LOCK_HELD = _HELD.with_for_update()
_UPDATE = sa.update(conversations).where(THIS)
_UPDATE_SEEN = _UPDATE.where(_c.revision == sa.bindparam("seen_revision", type_=sa.BigInteger))

_Row = tuple[Conversation, int | None]


@dataclass(frozen=True, slots=True)
class _Change:
    index: int
    """Place of its pin in the question."""
    old: Conversation
    params_id: int | None
    new: Conversation


@dataclass(frozen=True, slots=True)
class Answer:
    """What was read of an engine's pins, and what is to be written because of it."""

    statuses: list[PinStatus]
    renewed: list[_Change]
    expired: list[_Change]

    @property
    def changes(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.renewed or self.expired)


def read(
    connection: sa.Connection,
    worker_id: str,
    engine: EngineRef,
    pins: Sequence[HeldPin],
    now_us: int,
    policy: Policy,
) -> Answer | EngineGone:
    """Answer for the pins of an engine, changing nothing yet."""
    asked = _by(worker_id, engine)
    if not connection.execute(_IS_ALIVE, {**asked, "at_now": now_us}).scalar_one():
        return EngineGone()
    held = _held(connection, _HELD, asked, [pin.turn_id for pin in pins])
    answer = Answer([], [], [])
    for index, pin in enumerate(pins):
        old, params_id = held.get(pin.turn_id, (None, None))
        outcome = pin_rules.checked(old, pin, now_us, policy)
        answer.statuses.append(outcome.status)
        if old is not None and outcome.change is not None:
            expired = outcome.change.state is HandleState.EXPIRED
            changes = answer.expired if expired else answer.renewed
            changes.append(_Change(index, old, params_id, outcome.change))
    return answer


def write(connection: sa.Connection, answer: Answer, now_us: int, policy: Policy) -> PinsChecked:
    """Write what an answer changes; what has changed meanwhile stays as it is."""
    if answer.renewed:
        connection.execute(_UPDATE_SEEN, [_seen(change) for change in answer.renewed])
    statuses = list(answer.statuses)
    expired: list[_Row] = []
    for change in answer.expired:
        if connection.execute(_UPDATE_SEEN, _seen(change)).rowcount == 1:
            expired.append((change.old, change.params_id))
        else:
            # A turn may have got it just in time: not to be freed.
            status = statuses[change.index]
            statuses[change.index] = replace(status, verdict=PinVerdict.IN_USE)
    releases.write(connection, expired, ReleaseCause.EXPIRED, now_us, policy)
    return PinsChecked(statuses, len(answer.renewed), len(expired))


def evict(
    connection: sa.Connection,
    worker_id: str,
    engine: EngineRef,
    turn_ids: Sequence[str],
    now_us: int,
    policy: Policy,
) -> list[str]:
    """See LedgerStore.evict."""
    held = _held(connection, _LOCK_HELD, _by(worker_id, engine), turn_ids)
    evicted = {
        turn_id: held[turn_id]
        for turn_id in turn_ids
        if turn_id in held and pin_rules.may_evict(held[turn_id][0])
    }
    if evicted:
        changed = [pin_rules.evicted(row, now_us, policy) for row, _ in evicted.values()]
        values = [{**this(row.key), **conversation_to_row(row)} for row in changed]
        connection.execute(_UPDATE, values)
        releases.write(connection, list(evicted.values()), ReleaseCause.BUDGET, now_us, policy)
    return list(evicted)


def page(
    connection: sa.Connection,
    which: PinFilter,
    after: PinPosition | None,
    limit: int,
    now_us: int,
) -> list[RetainedPin]:
    """See LedgerStore.pins."""
    query = sa.select(*CONVERSATION_COLUMNS).where(
        _c.state.in_([state.value for state in LIVE_STATES]), _c.drop_time_us > now_us
    )
    wanted = ((_c.worker_id, which.worker_id), (_c.tenant, which.tenant), (_c.model, which.model))
    for column, value in wanted:
        if value is not None:
            query = query.where(column == value)
    order = (_c.worker_id, _c.commit_time_us, _c.tenant, _c.model, _c.conversation_id)
    if after is not None:
        key = after.key
        last = (
            after.worker_id,
            after.commit_time_us,
            key.tenant,
            key.model,
            key.conversation_id,
        )
        query = query.where(
            _c.worker_id >= after.worker_id,
            sa.tuple_(*order) > sa.tuple_(*map(sa.literal, last)),
        )
    rows = connection.execute(query.order_by(*order).limit(limit))
    found = [conversation_from_row(row) for row in rows]
    sizes = _block_bytes(connection, {row.worker_id for row in found})
    return [RetainedPin(row, sizes.get((row.worker_id, row.engine), 0)) for row in found]


def _by(worker_id: str, engine: EngineRef) -> dict[str, object]:
    return {"by_worker": worker_id, "by_engine": engine.engine_id, "by_epoch": engine.epoch}


def _held(
    connection: sa.Connection,
    query: sa.Select[tuple[object, ...]],
    by: dict[str, object],
    turn_ids: Sequence[str],
) -> dict[str, _Row]:
    found = connection.execute(query, {**by, "by_turns": list(turn_ids)})
    rows: list[_Row] = [(conversation_from_row(row), row.params_id) for row in found]
    return pin_rules.by_turn((row.commit_request_id, (row, at)) for row, at in rows)


def _seen(change: _Change) -> dict[str, object]:
    new = change.new
    return {
        **this(new.key),
        "seen_revision": change.old.revision,
        "state": new.state.value,
        "expire_time_us": new.expire_time_us,
        "drop_time_us": new.drop_time_us,
        "deadline_extension_us": new.deadline_extension_us,
        "due_time_us": new.due_time_us,
        "revision": new.revision,
    }


def _block_bytes(
    connection: sa.Connection, worker_ids: set[str]
) -> dict[tuple[str, EngineRef], int]:
    rows = connection.execute(sa.select(workers).where(workers.c.worker_id.in_(worker_ids)))
    records = [worker_from_row(row).worker for row in rows.mappings()]
    return {(each.worker_id, each.engine): each.traits.kv_block_bytes for each in records}
