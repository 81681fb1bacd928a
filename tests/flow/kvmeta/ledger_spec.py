"""What one conversation's calls have to answer, one after the other.

Written from the comments of ledger.proto and docs/adr/0001, and knows nothing of
kvmeta's code. A handle goes by the request id of the commit that left it behind.
No deadline passes here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Take:
    """TakeHandle."""

    request: str


@dataclass(frozen=True, slots=True)
class Commit:
    """CommitTurn."""

    request: str
    turn: int


@dataclass(frozen=True, slots=True)
class Return:
    """ReturnHandle of the handle that `handle` committed."""

    handle: str
    request: str


@dataclass(frozen=True, slots=True)
class End:
    """ReleaseConversation."""


@dataclass(frozen=True, slots=True)
class Extend:
    """ExtendConversation."""

    ttl_seconds: int


@dataclass(frozen=True, slots=True)
class Read:
    """GetConversation."""


@dataclass(frozen=True, slots=True)
class ReadReleases:
    """All releases of this conversation's handles in WatchReleases."""


@dataclass(frozen=True, slots=True)
class Renew:
    """RenewPins of the pin that `handle` left behind."""

    handle: str
    extension_seconds: int


@dataclass(frozen=True, slots=True)
class Evict:
    """EvictHandles of the handle that `handle` committed."""

    handle: str


Operation = Take | Commit | Return | End | Extend | Read | ReadReleases | Renew | Evict


@dataclass(frozen=True, slots=True)
class Given:
    """The handle is the caller's."""

    handle: str
    turn: int


@dataclass(frozen=True, slots=True)
class Missed:
    """There is no handle."""

    reason: str
    turn: int


@dataclass(frozen=True, slots=True)
class Done:
    """The change was made, or had been made by a call with the same request id."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was changed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """What an end found."""

    found: bool
    released: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """A conversation as read."""

    state: str
    turn: int
    ttl_seconds: int | None


@dataclass(frozen=True, slots=True)
class Freed:
    """Handles whose blocks D was told to free."""

    handles: frozenset[str]


@dataclass(frozen=True, slots=True)
class Renewed:
    """What shall become of a pin."""

    verdict: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """Whether the handle was taken back."""

    evicted: bool


Answer = Given | Missed | Done | Refused | Ended | Seen | Freed | Renewed | Evicted


@dataclass(frozen=True, slots=True)
class Handle:
    """The newest handle of a conversation."""

    committed_by: str
    turn: int
    state: str = "AVAILABLE"
    holder: str = ""
    holder_turn: int = 0
    evicted: bool = False
    """RELEASED to make room, not by the end of the conversation."""


@dataclass(frozen=True, slots=True)
class State:
    """All that the ledger has to know of one conversation."""

    known: bool = False
    opened: int = 0
    """Turns opened so far."""
    closed: int = 0
    """Turns that were open when the conversation was ended."""
    ttl_seconds: int | None = None
    handle: Handle | None = None
    freed: frozenset[str] = frozenset()


def apply(state: State, operation: Operation) -> tuple[State, Answer]:
    """The state after an operation, and its answer."""
    match operation:
        case Take(request):
            return _take(state, request)
        case Commit(request, turn):
            return _commit(state, request, turn)
        case Return(handle, request):
            return _give_back(state, handle, request)
        case End():
            return _end(state)
        case Extend(ttl_seconds):
            if state.handle is None:
                return state, Refused("CONVERSATION_NOT_FOUND")
            return replace(state, ttl_seconds=ttl_seconds), Done()
        case Read():
            if state.handle is None:
                return state, Refused("CONVERSATION_NOT_FOUND")
            return state, Seen(state.handle.state, state.handle.turn, state.ttl_seconds)
        case ReadReleases():
            return state, Freed(state.freed)
        case Renew(handle):
            return state, Renewed(_verdict(state, handle))
        case Evict(handle):
            return _evict(state, handle)


def _take(state: State, request: str) -> tuple[State, Answer]:
    handle = state.handle
    if not state.known:
        return state, Missed("FIRST_TURN", 1)
    if handle is not None and handle.state == "TAKEN" and handle.holder == request:
        return state, Given(handle.committed_by, handle.holder_turn)
    turn = state.opened + 1
    opened = replace(state, opened=turn)
    if handle is None:
        return opened, Missed("FIRST_TURN", turn)
    if handle.state != "AVAILABLE":
        return opened, Missed("EVICTED" if handle.evicted else handle.state, turn)
    if handle.committed_by == request:
        return opened, Missed("SPENT", turn)
    taken = replace(handle, state="TAKEN", holder=request, holder_turn=turn)
    return replace(opened, handle=taken), Given(handle.committed_by, turn)


def _commit(state: State, request: str, turn: int) -> tuple[State, Answer]:
    old = state.handle
    if old is not None and old.committed_by == request:
        return state, Done()
    age, number = turn or state.opened, turn or state.opened + 1
    if (state.closed and age <= state.closed) or (old is not None and number <= old.turn):
        return state, Refused("TURN_SUPERSEDED")
    unused = {old.committed_by} if old is not None and old.state == "AVAILABLE" else set()
    return (
        replace(
            state,
            known=True,
            opened=max(state.opened, number),
            handle=Handle(request, number),
            freed=state.freed | unused,
        ),
        Done(),
    )


def _give_back(state: State, handle: str, request: str) -> tuple[State, Answer]:
    held = state.handle
    if held is None or (held.state, held.committed_by, held.holder) != ("TAKEN", handle, request):
        return state, Refused("HANDLE_NOT_HELD")
    back = replace(held, holder="", holder_turn=0)
    if held.holder_turn <= state.closed:  # the conversation was ended meanwhile
        return _release(state, back), Done()
    return replace(state, handle=replace(back, state="AVAILABLE")), Done()


def _end(state: State) -> tuple[State, Answer]:
    if not state.known:
        return replace(state, known=True, opened=1, closed=1), Ended(False, False)
    closed = replace(state, closed=state.opened, ttl_seconds=None)
    handle = state.handle
    if handle is None or handle.state == "TAKEN":
        return closed, Ended(handle is not None, False)
    if handle.state == "AVAILABLE":
        return _release(closed, handle), Ended(True, True)
    return replace(closed, handle=replace(handle, evicted=False)), Ended(True, False)


def _evict(state: State, handle: str) -> tuple[State, Answer]:
    held = state.handle
    if held is None or (held.state, held.committed_by) != ("AVAILABLE", handle):
        return state, Evicted(False)
    return _release(state, replace(held, evicted=True)), Evicted(True)


def _verdict(state: State, handle: str) -> str:
    if state.handle is None or state.handle.committed_by != handle:
        return "UNOWNED"
    return {"AVAILABLE": "WANTED", "TAKEN": "IN_USE", "RELEASED": "RELEASE"}[state.handle.state]


def _release(state: State, handle: Handle) -> State:
    return replace(
        state,
        handle=replace(handle, state="RELEASED"),
        freed=state.freed | {handle.committed_by},
    )
