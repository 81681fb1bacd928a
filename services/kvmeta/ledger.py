"""The ledger: what the store's outcomes mean to a caller."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from kvloop.errors import (
    ConflictError,
    LimitError,
    NotFoundError,
    OutOfRangeError,
    PreconditionError,
)
from services.kvmeta import bell, deadlines, rules
from services.kvmeta.bell import Bell
from services.kvmeta.clock import Clock
from services.kvmeta.deadlines import Policy
from services.kvmeta.metrics import CommitOutcome, KvmetaMetrics
from services.kvmeta.model import (
    MICROSECONDS,
    Commit,
    Conversation,
    ConversationKey,
    EngineRef,
    HandleState,
    HeldPin,
    MissReason,
    PinStatus,
    Release,
    RetainedPin,
)
from services.kvmeta.store import (
    Ended,
    Forgotten,
    Hit,
    LedgerStore,
    Miss,
    PinFilter,
    PinPosition,
    Position,
    Swept,
    TooManyConversations,
    TtlNotHonoured,
)

_RELEASES_AT_ONCE = 16  # each carries params of up to megabytes
_PINS_AT_ONCE = 500  # between two of these, takes go on


@dataclass(frozen=True, slots=True)
class Taken:
    """A handle, and how long its engine surely keeps the blocks."""

    hit: Hit
    remaining_us: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A stored handle, and how long it is given out from now on."""

    conversation: Conversation
    granted_us: int


class Ledger:
    """Conversations and their handles.

    Args:
        store: where they are kept.
        clock: the ledger's clock.
        policy: the deployment's durations and limits.
        max_params_bytes: largest params of one handle.
        released: rung when a release was written; watchers wait for it.
        metrics: counts every outcome.
        watch_poll_seconds: how often watchers look for other processes' releases.
    """

    def __init__(
        self,
        store: LedgerStore,
        clock: Clock,
        policy: Policy,
        *,
        max_params_bytes: int,
        released: Bell,
        metrics: KvmetaMetrics,
        watch_poll_seconds: float,
    ) -> None:
        self._metrics = metrics
        self._store = store
        self._clock = clock
        self._policy = policy
        self._max_params_bytes = max_params_bytes
        self._released = released
        self._watch_poll_seconds = watch_poll_seconds

    async def take(self, key: ConversationKey, request_id: str) -> Taken | Miss:
        """Open the next turn and take the conversation's handle if there is one."""
        outcome = await self._take(key, request_id)
        self._metrics.took(outcome.reason if isinstance(outcome, Miss) else None)
        return outcome

    async def _take(self, key: ConversationKey, request_id: str) -> Taken | Miss:
        outcome = await self._store.take(key, request_id)
        if isinstance(outcome, Miss):
            return outcome
        row = outcome.conversation
        margin = deadlines.margin_us(row.engine_ttl_us, self._policy)
        remaining = row.drop_time_us - margin - self._clock.now_us()
        if remaining <= 0:  # the answer comes too late to be of use
            return Miss(outcome.turn, MissReason.EXPIRED, row.worker_id)
        return Taken(outcome, remaining)

    async def commit(self, commit: Commit) -> Committed:
        """Store a finished turn's handle.

        Raises:
            ConflictError: TURN_SUPERSEDED.
            PreconditionError: ENGINE_GONE.
            LimitError: the params are too large or the tenant has too many
                conversations.
        """
        size = len(commit.params)
        if size > self._max_params_bytes:
            self._metrics.committed(CommitOutcome.PARAMS_TOO_LARGE)
            raise LimitError(
                f"transfer_params_json has {size} bytes, more than the {self._max_params_bytes} "
                "allowed",
                reason="PARAMS_TOO_LARGE",
                limit=self._max_params_bytes,
            )
        verdict = await self._store.commit(commit, secrets.token_hex(16))
        match verdict:
            case rules.Stored(row, release_old):
                if release_old:
                    self._released.ring()
                self._metrics.committed(CommitOutcome.STORED)
                return Committed(row, self._left_us(row))
            case rules.Repeated(row):
                self._metrics.committed(CommitOutcome.REPEATED)
                return Committed(row, self._left_us(row))
            case rules.Superseded(newest_turn, ended):
                self._metrics.committed(CommitOutcome.ENDED if ended else CommitOutcome.SUPERSEDED)
                why = "the conversation was ended" if ended else f"turn {newest_turn} is stored"
                raise ConflictError(
                    f"{why} since this turn began; release its blocks",
                    reason="TURN_SUPERSEDED",
                    newest_turn=newest_turn,
                )
            case rules.EngineGone():
                self._metrics.committed(CommitOutcome.ENGINE_GONE)
                raise _engine_gone(commit.worker_id)
            case TooManyConversations():
                self._metrics.committed(CommitOutcome.TOO_MANY_CONVERSATIONS)
                limit = self._policy.max_conversations
                raise LimitError(
                    f"the tenant has {limit} conversations, as many as allowed",
                    reason="TOO_MANY_CONVERSATIONS",
                    limit=limit,
                )

    async def give_back(self, key: ConversationKey, handle_id: str, request_id: str) -> int:
        """Give a taken handle back; the revision.

        Raises:
            ConflictError: HANDLE_NOT_HELD.
        """
        revision = await self._store.give_back(key, handle_id, request_id)
        self._metrics.returned(held=revision is not None)
        if revision is None:
            raise ConflictError("the handle is not held by this request", reason="HANDLE_NOT_HELD")
        # The conversation may have been ended meanwhile: then this was a release.
        self._released.ring()
        return revision

    async def end(self, key: ConversationKey) -> Ended:
        """End a conversation."""
        ended = await self._store.end(key)
        if ended.released:
            self._released.ring()
        return ended

    async def extend(self, key: ConversationKey, ttl_us: int) -> int:
        """Set a conversation's TTL; for how long its handle is given out from now.

        Raises:
            NotFoundError: there is no such conversation.
            PreconditionError: TTL_NOT_HONOURED.
        """
        outcome = await self._store.extend(key, ttl_us)
        if outcome is None:
            raise _unknown_conversation()
        if isinstance(outcome, TtlNotHonoured):
            raise self._not_honoured(ttl_us, outcome.conversation)
        return self._left_us(outcome) if outcome.state is HandleState.AVAILABLE else 0

    async def get(self, key: ConversationKey) -> Conversation:
        """One conversation.

        Raises:
            NotFoundError: there is no such conversation.
        """
        conversation = await self._store.get(key)
        if conversation is None:
            raise _unknown_conversation()
        return conversation

    async def page(
        self, tenant: str, model: str | None, after: Position | None, limit: int
    ) -> list[Conversation]:
        """A tenant's conversations, most recently committed first."""
        return await self._store.conversations(tenant, model, after, limit)

    async def check_pins(
        self, worker_id: str, engine: EngineRef, pins: Sequence[HeldPin]
    ) -> list[PinStatus]:
        """Answer for each pin of an engine, and move the deadlines that it has confirmed.

        Each pin is answered for by itself: a call with many may be seen half done.

        Raises:
            PreconditionError: ENGINE_GONE.
        """
        statuses: list[PinStatus] = []
        for first in range(0, max(len(pins), 1), _PINS_AT_ONCE):
            checked = await self._store.check_pins(
                worker_id, engine, pins[first : first + _PINS_AT_ONCE]
            )
            if isinstance(checked, rules.EngineGone):
                raise _engine_gone(worker_id)
            statuses += checked.statuses
            self._metrics.pins_checked(checked.statuses)
            self._metrics.renewed(checked.renewed)
            if checked.expired:
                self._metrics.swept(Swept(expired=checked.expired))
                self._released.ring()
        return statuses

    async def evict(self, worker_id: str, engine: EngineRef, turn_ids: Sequence[str]) -> list[str]:
        """Take handles back to make room; the turns whose blocks may be freed."""
        evicted = await self._store.evict(worker_id, engine, turn_ids)
        self._metrics.evicted(len(evicted))
        if evicted:
            self._released.ring()
        return evicted

    async def pins(
        self, which: PinFilter, after: PinPosition | None, limit: int
    ) -> list[RetainedPin]:
        """What workers retain, by worker, oldest first."""
        return await self._store.pins(which, after, limit)

    async def watch_releases(
        self, worker_id: str, after_revision: int
    ) -> AsyncGenerator[Release, None]:
        """A worker's releases from a revision on, as they come. Never ends.

        Raises:
            OutOfRangeError: RELEASES_FORGOTTEN.
        """
        while True:
            rung = self._released.listen()
            found = await self._store.releases(worker_id, after_revision, _RELEASES_AT_ONCE)
            if isinstance(found, Forgotten):
                raise OutOfRangeError(
                    f"releases after revision {after_revision} are not remembered; watch from 0",
                    reason="RELEASES_FORGOTTEN",
                )
            for release in found:
                yield release
                after_revision = release.revision
            if len(found) < _RELEASES_AT_ONCE:
                await bell.wait(rung, self._watch_poll_seconds)

    def now_us(self) -> int:
        """The ledger's time."""
        return self._clock.now_us()

    def given_out_until_us(self, row: Conversation) -> int:
        """When the row's handle stops being given out, as long as its pin is renewed."""
        return deadlines.given_out_until_us(row, self._clock.now_us(), self._policy)

    def _left_us(self, row: Conversation) -> int:
        return max(0, self.given_out_until_us(row) - self._clock.now_us())

    def _not_honoured(self, ttl_us: int, row: Conversation) -> PreconditionError:
        longest = _seconds(deadlines.longest_ttl_us(row, self._policy))
        engine_ttl = _seconds(row.engine_ttl_us)
        why = (
            f"retained KV is kept for at most {longest:g} s"
            if row.retention_ttl_us
            else f"the engine keeps blocks for {engine_ttl:g} s, of which {longest:g} s can be used"
        )
        return PreconditionError(
            f"a TTL of {_seconds(ttl_us):g} s cannot be honoured: {why}",
            reason="TTL_NOT_HONOURED",
            ttl_seconds=_seconds(ttl_us),
            longest_ttl_seconds=longest,
            engine_ttl_seconds=engine_ttl,
        )


def _engine_gone(worker_id: str) -> PreconditionError:
    return PreconditionError(
        f"worker {worker_id!r} holds no lease for this life of its engine", reason="ENGINE_GONE"
    )


def _unknown_conversation() -> NotFoundError:
    return NotFoundError("no such conversation", reason="CONVERSATION_NOT_FOUND")


def _seconds(us: int) -> float:
    return us / MICROSECONDS
