"""The store in memory, for tests and for trying things out.

Nothing awaits inside a method, so the event loop makes each one atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.kvmeta import memory_pins, rules
from services.kvmeta.clock import Clock
from services.kvmeta.deadlines import Policy, longest_ttl_us
from services.kvmeta.memory_releases import MemoryReleases
from services.kvmeta.memory_rows import MemoryRows
from services.kvmeta.memory_workers import MemoryWorkers
from services.kvmeta.model import (
    LIVE_STATES,
    Commit,
    Conversation,
    ConversationKey,
    EngineRef,
    HandleState,
    HeldPin,
    MissReason,
    Release,
    ReleaseCause,
    Retained,
    RetainedPin,
    Worker,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.rules import CommitVerdict, EngineGone
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


class MemoryStore:
    """store.Store that forgets everything with its process.

    Args:
        clock: the ledger's clock.
        policy: the deployment's durations.
    """

    def __init__(self, clock: Clock, policy: Policy) -> None:
        self._clock = clock
        self._policy = policy
        # Revisions go on from the time, so that watchers of an earlier process
        # find theirs out of range instead of resuming in another history.
        self._log = MemoryReleases(policy, first_revision=clock.now_us())
        self._workers = MemoryWorkers(first_revision=clock.now_us())
        self._rows = MemoryRows(policy, self._log)

    async def take(self, key: ConversationKey, request_id: str) -> Hit | Miss:
        """See LedgerStore."""
        now = self._clock.now_us()
        row = self._rows.get(key)
        if row is None:
            return Miss(rules.FIRST_TURN, MissReason.FIRST_TURN, "")
        alive = self._workers.engine_alive(row.worker_id, row.engine, now)
        if rules.may_take(row, request_id, now, engine_alive=alive):
            row = self._rows.put(rules.taken(row, request_id, now))
            return Hit(row.take_turn, row, self._rows.params(key))
        if rules.is_repeated_take(row, request_id, now):
            return Hit(row.take_turn, row, self._rows.params(key))
        reason = rules.miss_reason(row, request_id, now, engine_alive=alive)
        row = self._rows.put(rules.turn_opened(row, now, self._policy))
        here = self._workers.is_here(row.worker_id, now)
        return Miss(row.issued_turn, reason, row.worker_id if here else "")

    async def commit(self, commit: Commit, handle_id: str) -> CommitVerdict | TooManyConversations:
        """See LedgerStore."""
        now = self._clock.now_us()
        old = self._rows.get(commit.key)
        verdict = rules.commit(
            old,
            commit,
            handle_id,
            now,
            self._policy,
            engine_alive=self._workers.engine_alive(commit.worker_id, commit.engine, now),
        )
        if not isinstance(verdict, rules.Stored):
            return verdict
        if old is None and self._rows.is_full(commit.key.tenant):
            return TooManyConversations()
        if old is not None and verdict.release_old:
            self._rows.release([old], ReleaseCause.SUPERSEDED, now)
        self._rows.put(verdict.row, commit.params)
        return verdict

    async def give_back(self, key: ConversationKey, handle_id: str, request_id: str) -> int | None:
        """See LedgerStore."""
        now = self._clock.now_us()
        row = rules.returned(self._rows.get(key), handle_id, request_id, now, self._policy)
        if row is None:
            return None
        self._rows.put(row)
        if row.state is HandleState.RELEASED:
            self._rows.release([row], ReleaseCause.ENDED, now)
        return row.revision

    async def end(self, key: ConversationKey) -> Ended:
        """See LedgerStore."""
        now = self._clock.now_us()
        old = self._rows.get(key)
        if old is None:
            if not self._rows.is_full(key.tenant):
                self._rows.put(rules.ended_before_first_turn(key, now, self._policy))
            return Ended(found=False, released=False)
        self._rows.put(rules.ended(old, now, self._policy))
        released = old.state is HandleState.AVAILABLE
        if released:
            self._rows.release([old], ReleaseCause.ENDED, now)
        return Ended(found=old.turn > 0, released=released)

    async def extend(
        self, key: ConversationKey, ttl_us: int
    ) -> Conversation | TtlNotHonoured | None:
        """See LedgerStore."""
        row = self._rows.get(key)
        if row is None or row.turn == 0:
            return None
        if ttl_us > longest_ttl_us(row, self._policy):
            return TtlNotHonoured(row)
        return self._rows.put(rules.extended(row, ttl_us, self._clock.now_us(), self._policy))

    async def get(self, key: ConversationKey) -> Conversation | None:
        """See LedgerStore."""
        row = self._rows.get(key)
        return row if row is not None and row.turn > 0 else None

    async def conversations(
        self, tenant: str, model: str | None, after: Position | None, limit: int
    ) -> list[Conversation]:
        """See LedgerStore."""

        def position(row: Conversation) -> tuple[int, str, str]:
            return (-row.commit_time_us, row.key.model, row.key.conversation_id)

        bound = (-after.commit_time_us, after.model, after.conversation_id) if after else None
        rows = [
            row
            for row in self._rows.all()
            if row.key.tenant == tenant
            and row.turn > 0
            and (model is None or row.key.model == model)
            and (bound is None or position(row) > bound)
        ]
        return sorted(rows, key=position)[:limit]

    async def check_pins(
        self, worker_id: str, engine: EngineRef, pins: Sequence[HeldPin]
    ) -> PinsChecked | EngineGone:
        """See LedgerStore."""
        now = self._clock.now_us()
        if not self._workers.engine_alive(worker_id, engine, now):
            return EngineGone()
        return memory_pins.check(self._rows, worker_id, engine, pins, now, self._policy)

    async def evict(self, worker_id: str, engine: EngineRef, turn_ids: Sequence[str]) -> list[str]:
        """See LedgerStore."""
        now = self._clock.now_us()
        return memory_pins.evict(self._rows, worker_id, engine, turn_ids, now, self._policy)

    async def pins(
        self, which: PinFilter, after: PinPosition | None, limit: int
    ) -> list[RetainedPin]:
        """See LedgerStore."""
        now = self._clock.now_us()
        return memory_pins.page(self._rows, which, after, limit, now, self._workers.block_bytes)

    async def releases(
        self, worker_id: str, after_revision: int, limit: int
    ) -> list[Release] | Forgotten:
        """See LedgerStore."""
        return self._log.after(worker_id, after_revision, limit)

    async def sweep(self, limit: int) -> Swept:
        """See LedgerStore."""
        now = self._clock.now_us()
        expired: list[Conversation] = []
        spent = forgotten = 0
        while len(expired) + spent + forgotten < limit:
            old = self._rows.pop_due(now)
            if old is None:
                break
            new = rules.swept(old, now, self._policy)
            if new is None:
                self._rows.forget(old.key)
                forgotten += 1
                continue
            self._rows.put(new)
            if new.state is HandleState.EXPIRED:
                expired.append(old)
            else:
                spent += 1
        self._rows.release(expired, ReleaseCause.EXPIRED, now)
        more = len(expired) + spent + forgotten == limit
        return Swept(len(expired), spent, forgotten, more)

    async def forget_releases(self, limit: int) -> bool:
        """See LedgerStore."""
        return self._log.forget(limit, self._clock.now_us()) == limit

    async def void_all(self) -> int:
        """See LedgerStore."""
        return self._void(lambda row: True, self._clock.now_us())

    async def register(self, worker: Worker, lease_id: str, lease_ttl_us: int) -> int:
        """See RegistryStore."""
        now = self._clock.now_us()
        voided = self._void(
            lambda row: row.worker_id == worker.worker_id and row.engine != worker.engine, now
        )
        self._workers.add(worker, lease_id, lease_ttl_us, now)
        return voided

    async def keep_alive(self, lease_id: str, state: WorkerState | None) -> Renewal | None:
        """See RegistryStore."""
        now = self._clock.now_us()
        record = self._workers.by_lease(lease_id)
        if record is None or record.lease_expire_us <= now:
            return None
        self._workers.renew(record, now)
        state_changed = state is not None and state is not record.worker.state
        if state is not None and state_changed:
            self._workers.change(replace(record.worker, state=state))
        return Renewal(record.lease_ttl_us, state_changed)

    async def end_lease(self, lease_id: str) -> str | None:
        """See RegistryStore."""
        record = self._workers.by_lease(lease_id)
        if record is None:
            return None
        self._remove(record, self._clock.now_us())
        return record.worker.worker_id

    async def end_leases(self, limit: int) -> list[str]:
        """See RegistryStore."""
        now = self._clock.now_us()
        over = [record for record in self._workers.with_lease() if record.lease_expire_us <= now][
            :limit
        ]
        for record in over:
            self._remove(record, now)
        return [record.worker.worker_id for record in over]

    async def extend_leases(self) -> int:
        """See RegistryStore."""
        now = self._clock.now_us()
        records = self._workers.with_lease()
        for record in records:
            self._workers.renew(record, now)
        return len(records)

    async def forget_workers(self, limit: int) -> int:
        """See RegistryStore."""
        before = self._clock.now_us() - self._policy.dead_retention_us
        gone = self._workers.forget(limit, before)
        for worker_id in gone:
            self._log.forget_worker(worker_id)
        return len(gone)

    async def workers(
        self, model: str | None, role: WorkerRole | None, after: str, limit: int
    ) -> list[tuple[WorkerRecord, Retained]]:
        """See RegistryStore."""
        now = self._clock.now_us()
        records = [
            record
            for record in self._workers.with_lease()
            if record.lease_expire_us > now
            and record.worker.worker_id > after
            and (model is None or record.worker.model == model)
            and (role is None or record.worker.role is role)
        ]
        return [(record, self._retained(record.worker)) for record in records[:limit]]

    async def registry(self) -> tuple[int, list[WorkerRecord]]:
        """See RegistryStore."""
        return self._workers.revision, self._workers.with_lease()

    async def worker_changes(self, after_revision: int) -> list[WorkerRecord] | Forgotten:
        """See RegistryStore."""
        return self._workers.changes(after_revision)

    def _void(self, which: Callable[[Conversation], bool], now_us: int) -> int:
        rows = [row for row in self._rows.all() if row.state in LIVE_STATES and which(row)]
        for row in rows:
            self._rows.put(rules.died(row, HandleState.VOID, now_us, self._policy))
        return len(rows)

    def _remove(self, record: WorkerRecord, now_us: int) -> None:
        worker = record.worker

        def held(row: Conversation) -> bool:
            return row.worker_id == worker.worker_id and row.engine == worker.engine

        unused = [
            row for row in self._rows.all() if row.state is HandleState.AVAILABLE and held(row)
        ]
        self._rows.release(unused, ReleaseCause.LEASE_ENDED, now_us)
        self._void(held, now_us)
        self._workers.remove(record, now_us)

    def _retained(self, worker: Worker) -> Retained:
        held = [
            row.num_blocks
            for row in self._rows.all()
            if row.state is HandleState.AVAILABLE
            and row.worker_id == worker.worker_id
            and row.engine == worker.engine
        ]
        return Retained(len(held), sum(held))
