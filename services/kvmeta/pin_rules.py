"""What shall become of retained KV that a worker holds: pure functions.

docs/adr/0030-retained-kv-as-a-lease.md has the protocol. A store calls them as
it calls rules.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from services.kvmeta import deadlines, rules
from services.kvmeta.deadlines import Policy
from services.kvmeta.model import (
    Conversation,
    HandleState,
    HeldPin,
    PinStatus,
    PinVerdict,
    ReleaseCause,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checked:
    """The answer for one pin, and the row that it changes, if it changes one."""

    status: PinStatus
    change: Conversation | None


def checked(row: Conversation | None, pin: HeldPin, now_us: int, policy: Policy) -> Checked:
    """Answer for a pin whose turn committed `row`, and move the row's deadline."""
    if row is None:
        return Checked(PinStatus(pin.turn_id, PinVerdict.UNOWNED), None)
    change = _expired(row, now_us, policy) or _renewed(row, pin, now_us, policy)
    return Checked(_status(change or row, pin, now_us, policy), change)


def may_evict(row: Conversation) -> bool:
    """Whether the row's handle can be taken back to make room: it is not given out."""
    return row.state is HandleState.AVAILABLE


def evicted(row: Conversation, now_us: int, policy: Policy) -> Conversation:
    """The row once its handle was taken back to make room."""
    return rules.released(row, ReleaseCause.BUDGET, now_us, policy)


def by_turn(rows: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Rows by the turn that committed them. A turn id that two conversations
    share names neither: nothing can be said of its pin."""
    found: dict[str, T] = {}
    ambiguous: set[str] = set()
    for turn_id, row in rows:
        if turn_id in found:
            ambiguous.add(turn_id)
        found[turn_id] = row
    return {turn_id: row for turn_id, row in found.items() if turn_id not in ambiguous}


def _expired(row: Conversation, now_us: int, policy: Policy) -> Conversation | None:
    """The row if its deadline has passed and the sweeper has not seen it yet.

    The change makes sure that no replica, with a clock a little behind, gives the
    handle out while the worker frees its blocks.
    """
    if row.state is HandleState.AVAILABLE and row.expire_time_us <= now_us:
        return rules.died(row, HandleState.EXPIRED, now_us, policy)
    return None


def _renewed(row: Conversation, pin: HeldPin, now_us: int, policy: Policy) -> Conversation | None:
    """The row after its engine has confirmed a later deadline; None if it has not.

    What is left of the deadline was measured before the message was sent, and may
    have waited on its way. How far it was moved since the last confirmation is
    exact. Both bound the true deadline from above, so the earlier one counts.
    """
    moved = pin.deadline_extension_us - row.deadline_extension_us
    if row.state is not HandleState.AVAILABLE or row.retention_ttl_us == 0 or moved <= 0:
        return None
    drop = min(now_us + pin.engine_remaining_us, row.drop_time_us + moved)
    wanted_until = deadlines.wanted_until_us(row, policy)
    expire = deadlines.expire_time_us(wanted_until, drop, row.engine_ttl_us, policy)
    return replace(
        row,
        expire_time_us=expire,
        drop_time_us=drop,
        deadline_extension_us=pin.deadline_extension_us,
        due_time_us=expire,
        revision=rules.next_revision(row.revision, now_us),
    )


def _status(row: Conversation, pin: HeldPin, now_us: int, policy: Policy) -> PinStatus:
    verdict = _verdict(row)
    if verdict is PinVerdict.UNOWNED:
        return PinStatus(pin.turn_id, verdict)
    until = deadlines.given_out_until_us(row, now_us, policy)
    wanted = max(0, until - now_us) if verdict is PinVerdict.WANTED else 0
    age = max(0, now_us - row.commit_time_us)
    return PinStatus(pin.turn_id, verdict, row.key, wanted, age, row.num_tokens)


def _verdict(row: Conversation) -> PinVerdict:
    match row.state:
        case HandleState.AVAILABLE:
            return PinVerdict.WANTED
        case HandleState.TAKEN:
            return PinVerdict.IN_USE
        case HandleState.RELEASED | HandleState.EXPIRED:
            return PinVerdict.RELEASE
        case HandleState.VOID:
            # Its engine's lease may have ended while a turn held the handle.
            return PinVerdict.UNOWNED if row.take_request_id else PinVerdict.RELEASE
        case HandleState.SPENT:
            return PinVerdict.UNOWNED
