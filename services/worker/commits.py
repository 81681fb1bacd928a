"""How a finished turn's handle gets into the ledger, or its blocks get freed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import structlog

from kvloop.errors import (
    ConflictError,
    InvalidFieldError,
    KvloopError,
    LimitError,
    PreconditionError,
    UnavailableError,
)
from services.common.backoff import Backoff
from services.common.span_attributes import RETAINED_TOKENS
from services.common.tracing import child_span
from services.worker.clock import Clock
from services.worker.event_hub import EventHub, FinishedTurn, TurnWatch
from services.worker.ledger import Commit, Conversation, Ledger
from services.worker.metrics import WorkerMetrics
from services.worker.pins import ReleaseCause
from services.worker.tasks import BackgroundTasks

_log = structlog.get_logger(__name__)

_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 2.0
_SHORT_HOLD_SECONDS = 0.05
"""How long an answer's end is held back while the ledger is known to be silent. Many
times what a commit takes, so that the turn sees a ledger that is back."""


class CommitOutcome(StrEnum):
    """What became of a turn's handle; see kvloop.worker.v1.CommitOutcome."""

    COMMITTED = "COMMITTED"
    NOT_REQUESTED = "NOT_REQUESTED"
    NOT_PINNED = "NOT_PINNED"
    SUPERSEDED = "SUPERSEDED"
    LEDGER_UNAVAILABLE = "LEDGER_UNAVAILABLE"
    NO_EVENT = "NO_EVENT"


@dataclass(frozen=True)
class CommitResult:
    """Outcome of a commit."""

    outcome: CommitOutcome
    retained_tokens: int = 0
    granted_seconds: float = 0.0


@dataclass(frozen=True)
class CommitLimits:
    """How long the steps of a commit may take."""

    event_timeout_seconds: float
    """For the connector's event, from the end of the answer."""
    commit_timeout_seconds: float
    """For one call to the ledger. The end of an answer is held back as long, unless
    the ledger was as slow for another turn and has not answered since."""
    settle_timeout_seconds: float
    """For finding out, in the background, what became of a commit whose reply
    was lost."""


class TurnCommitter:
    """Commits turns to the ledger.

    Blocks are released only when the ledger surely does not hold their handle.
    Releasing the blocks of a handle that is stored after all would let another
    engine read memory that has been given to someone else. So a commit whose
    reply is lost is repeated until its fate is known, and if it stays unknown
    the blocks fall at the engine's TTL.

    An answer ends when its turn is committed, so that whoever has all of it can use
    the handle. While the ledger is silent no handle could be taken either, and
    answers do not wait for it.

    Args:
        worker_id: this worker's id in the registry.
        ledger: where to commit to.
        hub: where to release.
        clock: measures the age of events, paces retries.
        metrics: counts outcomes.
        tasks: runs commits, so that a caller who goes away interrupts none.
        limits: timeouts.
    """

    def __init__(
        self,
        worker_id: str,
        ledger: Ledger,
        hub: EventHub,
        clock: Clock,
        metrics: WorkerMetrics,
        tasks: BackgroundTasks,
        limits: CommitLimits,
    ) -> None:
        self._worker_id = worker_id
        self._ledger = ledger
        self._hub = hub
        self._clock = clock
        self._metrics = metrics
        self._tasks = tasks
        self._limits = limits
        self._ledger_is_silent = False

    async def commit(self, watch: TurnWatch, conversation: Conversation) -> CommitResult:
        """Wait for the turn's event and store its handle.

        If the caller is cancelled while it waits for the event, the turn stays
        unclaimed and its blocks are released; after that the commit is finished
        whatever the caller does.
        """
        with child_span("commit_turn") as span:
            result = await self._commit(watch, conversation)
            span.tell(
                {
                    "kvloop.commit_outcome": result.outcome.value,
                    RETAINED_TOKENS: result.retained_tokens,
                }
            )
        return result

    async def _commit(self, watch: TurnWatch, conversation: Conversation) -> CommitResult:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.event_timeout_seconds):
                await watch.finished()
        turn = watch.turn  # which may have come as patience ended
        if turn is None:
            _log.error("finished_event_missing", turn_id=watch.turn_id)
            return CommitResult(CommitOutcome.NO_EVENT)
        if not turn.retained:
            return CommitResult(CommitOutcome.NOT_PINNED)
        watch.claim()
        storing = self._tasks.start(
            self._settle(turn, watch.turn_id, conversation), name=f"commit-{watch.turn_id}"
        )
        hold = self._limits.commit_timeout_seconds
        if self._ledger_is_silent:
            hold = min(hold, _SHORT_HOLD_SECONDS)
        try:
            async with asyncio.timeout(hold):
                return await asyncio.shield(storing)
        except TimeoutError:
            if storing.done():  # likewise: whatever was slow, it was not the ledger
                return await storing
            if hold >= self._limits.commit_timeout_seconds:
                # A short hold says nothing new: the ledger may have answered meanwhile.
                self._ledger_is_silent = True
            return CommitResult(CommitOutcome.LEDGER_UNAVAILABLE)

    async def _settle(
        self, turn: FinishedTurn, turn_id: str, conversation: Conversation
    ) -> CommitResult:
        try:
            return await self._store(turn, turn_id, conversation)
        finally:
            self._hub.pins.settle(turn_id, conversation.tenant)

    async def _store(
        self, turn: FinishedTurn, turn_id: str, conversation: Conversation
    ) -> CommitResult:
        log = _log.bind(turn_id=turn_id)
        give_up_at = self._clock.monotonic() + self._limits.settle_timeout_seconds
        may_be_stored = False
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS)
        while True:
            age = self._clock.monotonic() - turn.received_at
            if age >= turn.ttl_seconds:
                return CommitResult(CommitOutcome.LEDGER_UNAVAILABLE)  # the engine has dropped it
            commit = Commit(
                conversation=conversation,
                turn_id=turn_id,
                worker_id=self._worker_id,
                engine=turn.engine,
                params=turn.params,
                engine_ttl_seconds=turn.ttl_seconds - age,
                retention_ttl_seconds=max(turn.renewable_seconds - age, 0.0),
                num_tokens=turn.num_tokens,
                num_blocks=turn.num_blocks,
            )
            try:
                granted = await self._ask(commit)
            except ConflictError:
                self._hub.release_turn(turn, ReleaseCause.SUPERSEDED)
                return CommitResult(CommitOutcome.SUPERSEDED)
            except (PreconditionError, InvalidFieldError, LimitError) as error:
                log.warning("commit_refused", reason=error.reason, error=error.message)
                self._hub.release_turn(turn, ReleaseCause.NOT_STORED)
                return CommitResult(CommitOutcome.LEDGER_UNAVAILABLE)
            except KvloopError as error:
                may_be_stored = may_be_stored or not _never_reached(error)
                if not may_be_stored:
                    log.warning("commit_unreachable", reason=error.reason)
                    self._hub.release_turn(turn, ReleaseCause.NOT_STORED)
                    return CommitResult(CommitOutcome.LEDGER_UNAVAILABLE)
                if self._clock.monotonic() >= give_up_at:
                    log.error("commit_unsettled", reason=error.reason)
                    self._metrics.commits_unsettled.inc()
                    return CommitResult(CommitOutcome.LEDGER_UNAVAILABLE)
                log.warning("commit_repeated", reason=error.reason)
                await self._clock.sleep(backoff.next_seconds())
            except Exception:
                # A defect must cost this handle, not the engine beside us.
                log.exception("commit_failed")
                self._metrics.commits_unsettled.inc()
                return CommitResult(CommitOutcome.LEDGER_UNAVAILABLE)
            else:
                return CommitResult(CommitOutcome.COMMITTED, turn.num_tokens, granted)

    async def _ask(self, commit: Commit) -> float:
        """Ask the ledger once, and note whether it answers."""
        try:
            granted = await self._ledger.commit(
                commit, timeout_seconds=self._limits.commit_timeout_seconds
            )
        except (ConflictError, PreconditionError, InvalidFieldError, LimitError):
            self._ledger_is_silent = False
            raise
        self._ledger_is_silent = False
        return granted


def _never_reached(error: KvloopError) -> bool:
    return isinstance(error, UnavailableError) and error.metadata.get("reached") == "false"
