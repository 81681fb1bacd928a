"""Pins in memory: what the rows say of what workers hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.kvmeta import pin_rules
from services.kvmeta.deadlines import Policy
from services.kvmeta.memory_rows import MemoryRows
from services.kvmeta.model import (
    LIVE_STATES,
    Conversation,
    EngineRef,
    HandleState,
    HeldPin,
    ReleaseCause,
    RetainedPin,
)
from services.kvmeta.store import PinFilter, PinPosition, PinsChecked


def check(
    rows: MemoryRows,
    worker_id: str,
    engine: EngineRef,
    pins: Sequence[HeldPin],
    now_us: int,
    policy: Policy,
) -> PinsChecked:
    """See LedgerStore.check_pins, for an engine that is alive."""
    held = _held(rows, worker_id, engine)
    statuses = []
    renewed = expired = 0
    for pin in pins:
        old = held.get(pin.turn_id)
        outcome = pin_rules.checked(old, pin, now_us, policy)
        statuses.append(outcome.status)
        if old is None or outcome.change is None:
            continue
        held[pin.turn_id] = rows.put(outcome.change)
        if outcome.change.state is HandleState.EXPIRED:
            rows.release([old], ReleaseCause.EXPIRED, now_us)
            expired += 1
        else:
            renewed += 1
    return PinsChecked(statuses, renewed, expired)


def evict(
    rows: MemoryRows,
    worker_id: str,
    engine: EngineRef,
    turn_ids: Sequence[str],
    now_us: int,
    policy: Policy,
) -> list[str]:
    """See LedgerStore.evict."""
    held = _held(rows, worker_id, engine)
    evicted = []
    for turn_id in turn_ids:
        row = held.get(turn_id)
        if row is None or not pin_rules.may_evict(row):
            continue
        held[turn_id] = rows.put(pin_rules.evicted(row, now_us, policy))
        rows.release([row], ReleaseCause.BUDGET, now_us)
        evicted.append(turn_id)
    return evicted


def page(
    rows: MemoryRows,
    which: PinFilter,
    after: PinPosition | None,
    limit: int,
    now_us: int,
    block_bytes: Callable[[Conversation], int],
) -> list[RetainedPin]:
    """See LedgerStore.pins. `block_bytes`: memory of one block of a row's engine."""
    found = [
        row
        for row in rows.all()
        if row.state in LIVE_STATES
        and row.drop_time_us > now_us
        and which.worker_id in (None, row.worker_id)
        and which.tenant in (None, row.key.tenant)
        and which.model in (None, row.key.model)
        and (after is None or _place(row) > _bound(after))
    ]
    return [RetainedPin(row, block_bytes(row)) for row in sorted(found, key=_place)[:limit]]


_Place = tuple[str, int, str, str, str]


def _place(row: Conversation) -> _Place:
    return _bound(PinPosition(row.worker_id, row.commit_time_us, row.key))


def _bound(position: PinPosition) -> _Place:
    key = position.key
    age = position.commit_time_us
    return (position.worker_id, age, key.tenant, key.model, key.conversation_id)


def _held(rows: MemoryRows, worker_id: str, engine: EngineRef) -> dict[str, Conversation]:
    return pin_rules.by_turn(
        (row.commit_request_id, row)
        for row in rows.all()
        if row.worker_id == worker_id and row.engine == engine
    )
