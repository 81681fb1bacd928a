"""What may happen to a handle: pure functions, shared by every store.

A store calls them on a row that nobody else can change meanwhile. TakeHandle
alone is not here but a guarded statement in each store, because it is the race
that matters; `may_take` states its guard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.kvmeta.deadlines import (
    Policy,
    committed_expire_us,
    expire_time_us,
    wanted_until_us,
)
from services.kvmeta.model import (
    LIVE_STATES,
    Commit,
    Conversation,
    ConversationKey,
    EngineRef,
    HandleState,
    MissReason,
    ReleaseCause,
)

FIRST_TURN = 1
"""Turn number that an unknown conversation's take opens."""

GIVEN_OUT = (HandleState.TAKEN, HandleState.SPENT)
"""States whose blocks may have been read, so that nothing is left to free."""


def next_revision(previous: int, now_us: int) -> int:
    """Revision of a change: grows with each, also if the row is made anew."""
    return max(previous + 1, now_us)


def may_take(row: Conversation, request_id: str, now_us: int, *, engine_alive: bool) -> bool:
    """The guard of TakeHandle.

    The turn that committed a handle cannot take it: that would be a delayed
    repeat of the turn's own, long answered take.
    """
    return (
        row.state is HandleState.AVAILABLE
        and row.expire_time_us > now_us
        and row.commit_request_id != request_id
        and engine_alive
    )


def taken(row: Conversation, request_id: str, now_us: int) -> Conversation:
    """The row after a take that opened the next turn."""
    turn = row.issued_turn + 1
    return replace(
        row,
        state=HandleState.TAKEN,
        issued_turn=turn,
        take_request_id=request_id,
        take_turn=turn,
        revision=next_revision(row.revision, now_us),
    )


def is_repeated_take(row: Conversation, request_id: str, now_us: int) -> bool:
    """Whether this request holds the handle already, so that its answer was lost."""
    return (
        row.state is HandleState.TAKEN
        and row.take_request_id == request_id
        and row.expire_time_us > now_us
    )


def turn_opened(row: Conversation, now_us: int, policy: Policy) -> Conversation:
    """The row after a take that missed. The turn keeps a dead row remembered."""
    dead = row.state not in LIVE_STATES
    return replace(
        row,
        issued_turn=row.issued_turn + 1,
        due_time_us=now_us + policy.dead_retention_us if dead else row.due_time_us,
        revision=next_revision(row.revision, now_us),
    )


def miss_reason(
    row: Conversation, request_id: str, now_us: int, *, engine_alive: bool
) -> MissReason:
    """Why the row's handle is not given out: not `may_take`."""
    if row.turn == 0:
        return MissReason.FIRST_TURN
    if row.state is HandleState.AVAILABLE:
        if row.commit_request_id == request_id:
            return MissReason.SPENT
        return MissReason.EXPIRED if engine_alive else MissReason.VOID
    if row.state is HandleState.TAKEN and row.expire_time_us <= now_us:
        return MissReason.SPENT
    if row.release_cause is ReleaseCause.BUDGET:
        return MissReason.EVICTED
    return MissReason(row.state.value)


@dataclass(frozen=True, slots=True)
class Stored:
    """The commit is stored as `row`. `release_old`: the handle it replaces was
    never used, so its blocks shall be freed."""

    row: Conversation
    release_old: bool


@dataclass(frozen=True, slots=True)
class Repeated:
    """The same request committed `row` before."""

    row: Conversation


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer turn is stored, or the conversation was ended after this turn began."""

    newest_turn: int
    ended: bool


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The worker's lease or engine is gone."""


CommitVerdict = Stored | Repeated | Superseded | EngineGone


def commit(
    row: Conversation | None,
    commit: Commit,
    handle_id: str,
    now_us: int,
    policy: Policy,
    *,
    engine_alive: bool,
) -> CommitVerdict:
    """Decide on a commit that would be given handle_id.

    docs/adr/0001-ledger-turn-numbers.md has the reasons.
    """
    if row is None:
        turn = commit.turn or FIRST_TURN
    else:
        if row.commit_request_id == commit.request_id:
            if (row.worker_id, row.engine) != (commit.worker_id, commit.engine):
                # The turn was decoded again elsewhere. Its first handle may have
                # been given out already, so that one stays.
                return Superseded(row.turn, ended=False)
            return Repeated(row)
        turn = commit.turn or row.issued_turn + 1
        # A turn that could not ask for its number may be older than the end:
        # it counts as older until a take has opened a turn after the end.
        age = commit.turn or row.issued_turn
        if age <= row.ended_turn:
            return Superseded(row.turn, ended=True)
        if turn <= row.turn:
            return Superseded(row.turn, ended=False)
    if not engine_alive:
        return EngineGone()
    conversation_ttl = row.conversation_ttl_us if row else None
    expire = committed_expire_us(commit, conversation_ttl, now_us, policy)
    revision = next_revision(row.revision if row else 0, now_us)
    return Stored(
        Conversation(
            key=commit.key,
            issued_turn=max(row.issued_turn, turn) if row else turn,
            ended_turn=row.ended_turn if row else 0,
            conversation_ttl_us=conversation_ttl,
            state=HandleState.AVAILABLE,
            release_cause=None,
            turn=turn,
            handle_id=handle_id,
            worker_id=commit.worker_id,
            engine=commit.engine,
            num_tokens=commit.num_tokens,
            num_blocks=commit.num_blocks,
            take_request_id="",
            take_turn=0,
            commit_request_id=commit.request_id,
            commit_revision=revision,
            commit_time_us=now_us,
            expire_time_us=expire,
            engine_ttl_us=commit.engine_ttl_us,
            retention_ttl_us=commit.retention_ttl_us,
            drop_time_us=now_us + commit.engine_ttl_us,
            deadline_extension_us=0,
            due_time_us=expire,
            revision=revision,
        ),
        release_old=row is not None and row.state is HandleState.AVAILABLE,
    )


def returned(
    row: Conversation | None, handle_id: str, request_id: str, now_us: int, policy: Policy
) -> Conversation | None:
    """The row after the holder gave the handle back; None if it holds none.

    If the conversation was ended meanwhile nobody will want the handle, and it
    becomes RELEASED instead of AVAILABLE.
    """
    if (
        row is None
        or row.state is not HandleState.TAKEN
        or row.handle_id != handle_id
        or row.take_request_id != request_id
        or row.expire_time_us <= now_us
    ):
        return None
    if row.take_turn <= row.ended_turn:
        return released(row, ReleaseCause.ENDED, now_us, policy)
    return replace(
        row,
        state=HandleState.AVAILABLE,
        take_request_id="",
        take_turn=0,
        revision=next_revision(row.revision, now_us),
    )


def ended(row: Conversation, now_us: int, policy: Policy) -> Conversation:
    """The row after its conversation was ended.

    Every turn opened so far will lose its commit. A taken handle stays taken:
    its blocks may be read at this moment and must not be freed.
    """
    closed = replace(row, ended_turn=row.issued_turn, conversation_ttl_us=None)
    if row.state is HandleState.TAKEN:
        return replace(closed, revision=next_revision(row.revision, now_us))
    if row.state in (HandleState.AVAILABLE, HandleState.RELEASED):
        return released(closed, ReleaseCause.ENDED, now_us, policy)
    return died(closed, row.state, now_us, policy)


def ended_before_first_turn(key: ConversationKey, now_us: int, policy: Policy) -> Conversation:
    """A row that makes the commit of a first turn, still running, lose."""
    return Conversation(
        key=key,
        issued_turn=FIRST_TURN,
        ended_turn=FIRST_TURN,
        conversation_ttl_us=None,
        state=HandleState.RELEASED,
        release_cause=ReleaseCause.ENDED,
        turn=0,
        handle_id="",
        worker_id="",
        engine=EngineRef("", ""),
        num_tokens=0,
        num_blocks=0,
        take_request_id="",
        take_turn=0,
        commit_request_id="",
        commit_revision=0,
        commit_time_us=0,
        expire_time_us=0,
        engine_ttl_us=0,
        retention_ttl_us=0,
        drop_time_us=0,
        deadline_extension_us=0,
        due_time_us=now_us + policy.dead_retention_us,
        revision=now_us,
    )


def extended(row: Conversation, ttl_us: int, now_us: int, policy: Policy) -> Conversation:
    """The row with another TTL. Only a handle that can still be given out moves
    its deadline: what has expired stays expired."""
    changed = replace(row, conversation_ttl_us=ttl_us, revision=next_revision(row.revision, now_us))
    if row.state is not HandleState.AVAILABLE or row.expire_time_us <= now_us:
        return changed
    wanted_until = wanted_until_us(changed, policy)
    expire = expire_time_us(wanted_until, row.drop_time_us, row.engine_ttl_us, policy)
    return replace(changed, expire_time_us=expire, due_time_us=expire)


def released(row: Conversation, cause: ReleaseCause, now_us: int, policy: Policy) -> Conversation:
    """The row once its handle is RELEASED."""
    return replace(died(row, HandleState.RELEASED, now_us, policy), release_cause=cause)


def died(row: Conversation, state: HandleState, now_us: int, policy: Policy) -> Conversation:
    """The row once its handle can never be given out again."""
    return replace(
        row,
        state=state,
        due_time_us=now_us + policy.dead_retention_us,
        revision=next_revision(row.revision, now_us),
    )


def swept(row: Conversation, now_us: int, policy: Policy) -> Conversation | None:
    """The row after its due time has passed; None if it is to be forgotten."""
    if row.state is HandleState.AVAILABLE:
        return died(row, HandleState.EXPIRED, now_us, policy)
    if row.state is HandleState.TAKEN:
        return died(row, HandleState.SPENT, now_us, policy)
    return None
