"""Whether the calls of one conversation can be explained: a pure function.

They can if there is an order of the calls, each at some moment between its begin
and its end, in which the specification gives exactly the answers that came. A
call without an answer may be left out. All orders are tried, call by call: what
is kept is the set of states in which the ledger may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from tests.flow.kvmeta.journal import Call
from tests.flow.kvmeta.ledger_spec import (
    Commit,
    Evicted,
    Freed,
    Given,
    Missed,
    Renewed,
    Seen,
    State,
    Take,
    apply,
)


class Kind(Enum):
    """What is wrong with an answer that nothing explains."""

    DOUBLED = "a handle was given out again"
    INVENTED = "a handle was given out that nobody has stored"
    MIXED_UP = "a handle's id and its params belong to different commits"
    LOST = "a handle that was stored and not given out is gone"
    RESURRECTED = "a handle is AVAILABLE after having been given out"
    FREED_IN_USE = "blocks are to be freed although their handle was given out"
    LEAKED = "nobody was told to free the blocks of a handle that can be used no more"
    UNEXPLAINED = "no order of the calls explains the answer"


@dataclass(frozen=True)
class Violation:
    """The first answer that nothing explains, and what the ledger may have been."""

    kind: Kind
    call: Call
    possible: frozenset[State]


@dataclass(frozen=True, slots=True)
class _World:
    """The ledger's state if exactly these begun calls are yet to be carried out."""

    state: State
    pending: frozenset[int]


def check(calls: Sequence[Call]) -> Violation | None:
    """The first violation in the calls of one conversation, or None."""
    worlds = {_World(State(), frozenset())}
    for number, begins in _events(calls):
        call = calls[number]
        if begins:
            worlds = {_World(each.state, each.pending | {number}) for each in worlds}
            continue
        reached = _reached(worlds, calls)
        if call.answer is None:
            worlds = {_World(each.state, each.pending - {number}) for each in reached}
            continue
        worlds = {each for each in reached if number not in each.pending}
        if not worlds:
            possible = frozenset(each.state for each in reached)
            return Violation(_kind(call, calls, possible), call, possible)
    return _mixed_up(calls)


def _events(calls: Sequence[Call]) -> Iterator[tuple[int, bool]]:
    """Begins and ends in their order: the call's number, and whether it begins."""
    events = [(call.began, number, True) for number, call in enumerate(calls)]
    events += [
        (call.ended, number, False) for number, call in enumerate(calls) if call.ended is not None
    ]
    for _, number, begins in sorted(events):
        yield number, begins


def _reached(worlds: set[_World], calls: Sequence[Call]) -> set[_World]:
    """These worlds, and all they become when pending calls are carried out."""
    reached = set(worlds)
    unseen = list(worlds)
    while unseen:
        world = unseen.pop()
        for number in world.pending:
            call = calls[number]
            state, answer = apply(world.state, call.operation)
            if call.answer is not None and call.answer != answer:
                continue
            after = _World(state, world.pending - {number})
            if after not in reached:
                reached.add(after)
                unseen.append(after)
    return reached


def _kind(call: Call, calls: Sequence[Call], possible: frozenset[State]) -> Kind:
    """Name what is wrong with `call`'s answer in every possible state."""
    before = [each for each in calls if each.ended is not None and each.ended < (call.ended or 0)]
    given = {each.answer.handle for each in before if isinstance(each.answer, Given)}
    committed = {each.operation.request for each in calls if isinstance(each.operation, Commit)}
    available = all(
        state.handle is not None and state.handle.state == "AVAILABLE" for state in possible
    )
    match call.answer:
        case Given(handle) if handle not in committed:
            return Kind.INVENTED
        case Given(handle) if handle in given:
            return Kind.DOUBLED
        case Missed() if available and isinstance(call.operation, Take):
            return Kind.LOST
        case Seen("AVAILABLE") if not available:
            return Kind.RESURRECTED
        case Seen(state) if available and state != "AVAILABLE":
            return Kind.LOST
        case Renewed("RELEASE") | Evicted(True) if not available:
            return Kind.FREED_IN_USE
        case Freed(handles) if all(handles - state.freed for state in possible):
            return Kind.FREED_IN_USE
        case Freed(handles) if all(state.freed - handles for state in possible):
            return Kind.LEAKED
    return Kind.UNEXPLAINED


def _mixed_up(calls: Sequence[Call]) -> Violation | None:
    """A handle whose id belongs to one commit and whose params to another."""
    ids: dict[str, str] = {}
    names: dict[str, str] = {}
    for call in calls:
        if not call.handle_id:
            continue
        name = call.answer.handle if isinstance(call.answer, Given) else _request(call)
        if ids.setdefault(name, call.handle_id) != call.handle_id:
            return Violation(Kind.MIXED_UP, call, frozenset())
        if names.setdefault(call.handle_id, name) != name:
            return Violation(Kind.MIXED_UP, call, frozenset())
    return None


def _request(call: Call) -> str:
    assert isinstance(call.operation, Commit)
    return call.operation.request
