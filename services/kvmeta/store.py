"""The store port: every change of the ledger and the registry, one call each.

Implementations: memory_store.MemoryStore, and sql.store.SqlStore over SQLite or
PostgreSQL. One contract suite runs over all of them (tests/contract).

What holds for every call:
- It is atomic, and stays so if its caller is cancelled: all of it or nothing.
- It reads the ledger's clock itself, once, when it runs.
- What the state of things does not allow is an outcome, not an exception.
- UnavailableError means that the store cannot be reached; whether the change
  was made is then unknown, and repeating it with the same request id is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.kvmeta.model import (
    Commit,
    Conversation,
    ConversationKey,
    EngineRef,
    HeldPin,
    MissReason,
    PinStatus,
    Release,
    Retained,
    RetainedPin,
    Worker,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.rules import CommitVerdict, EngineGone


@dataclass(frozen=True, slots=True)
class Hit:
    """The handle of `conversation` is the caller's."""

    turn: int
    conversation: Conversation
    params: bytes


@dataclass(frozen=True, slots=True)
class Miss:
    """There is no handle. `last_worker_id` is empty if that worker is gone."""

    turn: int
    reason: MissReason
    last_worker_id: str


@dataclass(frozen=True, slots=True)
class TooManyConversations:
    """The tenant has as many conversations as the policy allows."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What an end found. `released`: it took back a handle that was AVAILABLE."""

    found: bool
    released: bool


@dataclass(frozen=True, slots=True)
class TtlNotHonoured:
    """The wanted TTL is longer than the conversation's blocks can be kept."""

    conversation: Conversation


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The position lies outside of what is remembered."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What one bounded sweep did."""

    expired: int = 0
    """Handles that became EXPIRED; a release was written for each."""
    spent: int = 0
    """Taken handles whose holder committed nothing."""
    forgotten: int = 0
    """Dead rows deleted."""
    more: bool = False
    """Whether the sweep stopped at its limit."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """A renewed lease."""

    ttl_us: int
    state_changed: bool


@dataclass(frozen=True, slots=True)
class Position:
    """Place in a tenant's conversations, most recently committed first."""

    commit_time_us: int
    model: str
    conversation_id: str


@dataclass(frozen=True, slots=True)
class PinsChecked:
    """What the ledger says of pins, in the order of the question."""

    statuses: list[PinStatus]
    renewed: int = 0
    """Handles whose deadline moved."""
    expired: int = 0
    """Handles found EXPIRED; a release was written for each."""


@dataclass(frozen=True, slots=True)
class PinFilter:
    """Which pins to list; None lists those of every worker, tenant or model."""

    worker_id: str | None = None
    tenant: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class PinPosition:
    """Place among all pins: by worker, then by age, oldest first."""

    worker_id: str
    commit_time_us: int
    key: ConversationKey


class LedgerStore(Protocol):
    """Conversations, their handles, and the log of releases."""

    async def take(self, key: ConversationKey, request_id: str) -> Hit | Miss:
        """Open the conversation's next turn and take its handle if `rules.may_take`.

        Of any number of concurrent takes one at most is a Hit. A repeat by the
        holder is the same Hit again. An unknown conversation gets turn 1 and
        no row.
        """
        ...

    async def commit(self, commit: Commit, handle_id: str) -> CommitVerdict | TooManyConversations:
        """Store what `rules.commit` accepts, as the handle of that id.

        A replaced handle that was AVAILABLE gets a release. A new conversation
        counts against the tenant's limit.
        """
        ...

    async def give_back(self, key: ConversationKey, handle_id: str, request_id: str) -> int | None:
        """Undo a take as `rules.returned` says.

        Returns:
            The revision, or None if this request does not hold this handle.
        """
        ...

    async def end(self, key: ConversationKey) -> Ended:
        """End the conversation, so that no turn opened so far can commit.

        Ending an unknown one leaves a row without a handle, unless the tenant
        is at its limit.
        """
        ...

    async def extend(
        self, key: ConversationKey, ttl_us: int
    ) -> Conversation | TtlNotHonoured | None:
        """Set the conversation's TTL and move its handle's deadline.

        Returns:
            The row as it is now, or None if there is none with a handle.
        """
        ...

    async def get(self, key: ConversationKey) -> Conversation | None:
        """The conversation; None if there is none with a handle."""
        ...

    async def conversations(
        self, tenant: str, model: str | None, after: Position | None, limit: int
    ) -> list[Conversation]:
        """A tenant's conversations with a handle, most recently committed first."""
        ...

    async def check_pins(
        self, worker_id: str, engine: EngineRef, pins: Sequence[HeldPin]
    ) -> PinsChecked | EngineGone:
        """Answer for each pin of an engine as `pin_rules.checked` says.

        A row is found by the turn that committed it, on this worker and engine
        only. EngineGone: the worker holds no lease for this life of its engine.
        """
        ...

    async def evict(self, worker_id: str, engine: EngineRef, turn_ids: Sequence[str]) -> list[str]:
        """Make the handles RELEASED for which `pin_rules.may_evict`, with a release each.

        Returns:
            The turns whose handles this call released, in the order of the question.
        """
        ...

    async def pins(
        self, which: PinFilter, after: PinPosition | None, limit: int
    ) -> list[RetainedPin]:
        """Live handles whose engine still holds the blocks, in the order of PinPosition."""
        ...

    async def releases(
        self, worker_id: str, after_revision: int, limit: int
    ) -> list[Release] | Forgotten:
        """A worker's releases above a revision, in order.

        Forgotten, unless after_revision is 0, if a release above it was deleted
        already, or if it is a revision that was never given out.
        """
        ...

    async def sweep(self, limit: int) -> Swept:
        """Apply `rules.swept` to at most `limit` rows that are due, earliest first.

        Replicas that sweep at the same time get different rows.
        """
        ...

    async def forget_releases(self, limit: int) -> bool:
        """Delete at most `limit` releases, and as many params, past their retention.

        Returns:
            Whether it stopped at its limit.
        """
        ...

    async def void_all(self) -> int:
        """Make every live handle VOID, for a ledger that cannot trust its past."""
        ...


class RegistryStore(Protocol):
    """Workers and their leases."""

    async def register(self, worker: Worker, lease_id: str, lease_ttl_us: int) -> int:
        """Store the worker under a new lease; an older lease of it is gone.

        Returns:
            How many live handles of the worker's other engine lives became VOID.
        """
        ...

    async def keep_alive(self, lease_id: str, state: WorkerState | None) -> Renewal | None:
        """Renew a lease that has not run out, and set the state if given.

        Returns:
            None if the lease is gone.
        """
        ...

    async def end_lease(self, lease_id: str) -> str | None:
        """Remove the worker and make its live handles VOID. Those that were
        AVAILABLE get a release: the engine may well live on.

        Returns:
            The worker's id, or None if there is no such lease.
        """
        ...

    async def end_leases(self, limit: int) -> list[str]:
        """Do as `end_lease` does for at most `limit` leases that ran out.

        Returns:
            The workers' ids.
        """
        ...

    async def extend_leases(self) -> int:
        """Give every lease a full period from now, after the ledger was away.

        Returns:
            How many leases there are.
        """
        ...

    async def forget_workers(self, limit: int) -> int:
        """Delete at most `limit` removed workers past the retention of dead rows."""
        ...

    async def workers(
        self, model: str | None, role: WorkerRole | None, after: str, limit: int
    ) -> list[tuple[WorkerRecord, Retained]]:
        """Workers with a lease and an id above `after`, by id."""
        ...

    async def registry(self) -> tuple[int, list[WorkerRecord]]:
        """The registry's revision and, as of it, every worker with a lease, by id."""
        ...

    async def worker_changes(self, after_revision: int) -> list[WorkerRecord] | Forgotten:
        """Workers changed or removed above a revision, in order of their last change.

        Forgotten, unless after_revision is 0, if a worker that was removed above it
        was deleted already, or if it is a revision that was never given out.
        """
        ...


class Store(LedgerStore, RegistryStore, Protocol):
    """Everything kvmeta remembers, behind one clock."""
