"""The store port over SQL: one transaction per call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import sqlalchemy as sa

from services.kvmeta import rules
from services.kvmeta.clock import Clock
from services.kvmeta.deadlines import Policy
from services.kvmeta.model import (
    Commit,
    Conversation,
    ConversationKey,
    EngineRef,
    HeldPin,
    Release,
    Retained,
    RetainedPin,
    Worker,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.rules import CommitVerdict, EngineGone
from services.kvmeta.sql import conversations, leases, releases, sweeping, taking
from services.kvmeta.sql import pins as sql_pins
from services.kvmeta.sql.transactions import Transactions
from services.kvmeta.store import (
    Ended,
    Forgotten,
    Hit,
    Miss,
    PinFilter,
    PinPosition,
    PinsChecked,
    Position,
    Renewal,
    Swept,
    TooManyConversations,
    TtlNotHonoured,
)

T = TypeVar("T")


class SqlStore:
    """store.Store over SQLite or PostgreSQL.

    Args:
        transactions: how transactions run.
        clock: the ledger's clock, read once in each transaction.
        policy: the deployment's durations.
    """

    def __init__(self, transactions: Transactions, clock: Clock, policy: Policy) -> None:
        self._transactions = transactions
        self._clock = clock
        self._policy = policy

    async def take(self, key: ConversationKey, request_id: str) -> Hit | Miss:
        """See LedgerStore."""
        return await self._write_single(
            lambda c, now: taking.take(c, key, request_id, now, self._policy)
        )

    async def commit(self, commit: Commit, handle_id: str) -> CommitVerdict | TooManyConversations:
        """See LedgerStore."""
        if commit.turn > rules.FIRST_TURN:  # others hold no handle
            stored = await self._write_single(
                lambda c, now: conversations.commit_by_holder(
                    c, commit, handle_id, now, self._policy
                )
            )
            if stored is not None:
                return stored
        return await self._write(
            lambda c, now: conversations.commit(c, commit, handle_id, now, self._policy)
        )

    async def give_back(self, key: ConversationKey, handle_id: str, request_id: str) -> int | None:
        """See LedgerStore."""
        return await self._write(
            lambda c, now: conversations.give_back(c, key, handle_id, request_id, now, self._policy)
        )

    async def end(self, key: ConversationKey) -> Ended:
        """See LedgerStore."""
        return await self._write(lambda c, now: conversations.end(c, key, now, self._policy))

    async def extend(
        self, key: ConversationKey, ttl_us: int
    ) -> Conversation | TtlNotHonoured | None:
        """See LedgerStore."""
        return await self._write(
            lambda c, now: conversations.extend(c, key, ttl_us, now, self._policy)
        )

    async def get(self, key: ConversationKey) -> Conversation | None:
        """See LedgerStore."""
        return await self._transactions.read(lambda c: conversations.get(c, key))

    async def conversations(
        self, tenant: str, model: str | None, after: Position | None, limit: int
    ) -> list[Conversation]:
        """See LedgerStore."""
        return await self._transactions.read(
            lambda c: conversations.page(c, tenant, model, after, limit)
        )

    async def check_pins(
        self, worker_id: str, engine: EngineRef, pins: Sequence[HeldPin]
    ) -> PinsChecked | EngineGone:
        """See LedgerStore."""
        now = self._clock.now_us()
        answer = await self._transactions.read(
            lambda c: sql_pins.read(c, worker_id, engine, pins, now, self._policy)
        )
        if isinstance(answer, EngineGone):
            return answer
        if not answer.changes:
            return PinsChecked(answer.statuses)
        return await self._transactions.write(
            lambda c: sql_pins.write(c, answer, now, self._policy)
        )

    async def evict(self, worker_id: str, engine: EngineRef, turn_ids: Sequence[str]) -> list[str]:
        """See LedgerStore."""
        return await self._write(
            lambda c, now: sql_pins.evict(c, worker_id, engine, turn_ids, now, self._policy)
        )

    async def pins(
        self, which: PinFilter, after: PinPosition | None, limit: int
    ) -> list[RetainedPin]:
        """See LedgerStore."""
        now = self._clock.now_us()
        return await self._transactions.read(lambda c: sql_pins.page(c, which, after, limit, now))

    async def releases(
        self, worker_id: str, after_revision: int, limit: int
    ) -> list[Release] | Forgotten:
        """See LedgerStore."""
        return await self._transactions.read(
            lambda c: releases.after(c, worker_id, after_revision, limit)
        )

    async def sweep(self, limit: int) -> Swept:
        """See LedgerStore."""
        return await self._write(lambda c, now: sweeping.sweep(c, limit, now, self._policy))

    async def forget_releases(self, limit: int) -> bool:
        """See LedgerStore."""
        return await self._write(lambda c, now: sweeping.forget_releases(c, limit, now))

    async def void_all(self) -> int:
        """See LedgerStore."""
        return await self._write(lambda c, now: leases.void_all(c, now, self._policy))

    async def register(self, worker: Worker, lease_id: str, lease_ttl_us: int) -> int:
        """See RegistryStore."""
        return await self._write(
            lambda c, now: leases.register(c, worker, lease_id, lease_ttl_us, now, self._policy)
        )

    async def keep_alive(self, lease_id: str, state: WorkerState | None) -> Renewal | None:
        """See RegistryStore."""
        return await self._write(lambda c, now: leases.keep_alive(c, lease_id, state, now))

    async def end_lease(self, lease_id: str) -> str | None:
        """See RegistryStore."""
        return await self._write(lambda c, now: leases.end_lease(c, lease_id, now, self._policy))

    async def end_leases(self, limit: int) -> list[str]:
        """See RegistryStore."""
        return await self._write(lambda c, now: leases.end_leases(c, limit, now, self._policy))

    async def extend_leases(self) -> int:
        """See RegistryStore."""
        return await self._write(leases.extend_leases)

    async def forget_workers(self, limit: int) -> int:
        """See RegistryStore."""
        return await self._write(lambda c, now: leases.forget(c, limit, now, self._policy))

    async def workers(
        self, model: str | None, role: WorkerRole | None, after: str, limit: int
    ) -> list[tuple[WorkerRecord, Retained]]:
        """See RegistryStore."""
        now = self._clock.now_us()
        return await self._transactions.read(
            lambda c: leases.page(c, model, role, after, limit, now)
        )

    async def registry(self) -> tuple[int, list[WorkerRecord]]:
        """See RegistryStore."""
        return await self._transactions.read(leases.registry)

    async def worker_changes(self, after_revision: int) -> list[WorkerRecord] | Forgotten:
        """See RegistryStore."""
        return await self._transactions.read(lambda c: leases.changes(c, after_revision))

    async def _write(self, work: Callable[[sa.Connection, int], T]) -> T:
        return await self._transactions.write(
            lambda connection: work(connection, self._clock.now_us())
        )

    async def _write_single(self, work: Callable[[sa.Connection, int], T]) -> T:
        return await self._transactions.write_single(
            lambda connection: work(connection, self._clock.now_us())
        )
