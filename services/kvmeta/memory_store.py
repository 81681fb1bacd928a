"""The store in memory, for tests and for trying things out.

Nothing awaits inside a method, so the event loop makes each one atomic.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from services.kvmeta import rules
from services.kvmeta.clock import Clock
from services.kvmeta.memory_releases import MemoryReleases
from services.kvmeta.model import (
    LIVE_STATES,
    Commit,
    Conversation,
    ConversationKey,
    EngineRef,
    HandleState,
    MissReason,
    Release,
    ReleaseCause,
    Retained,
    Worker,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.rules import CommitVerdict, Policy
from services.kvmeta.store import (
    Ended,
    Forgotten,
    Hit,
    Miss,
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
        self._rows: dict[ConversationKey, Conversation] = {}
        self._params: dict[ConversationKey, bytes] = {}
        self._per_tenant: Counter[str] = Counter()
        self._due: list[tuple[int, int, ConversationKey]] = []
        self._tiebreak = itertools.count()
        self._log = MemoryReleases(policy)
        self._workers: dict[str, WorkerRecord] = {}
        self._registry_revision = 0

    async def take(self, key: ConversationKey, request_id: str) -> Hit | Miss:
        """See LedgerStore."""
        now = self._clock.now_us()
        row = self._rows.get(key)
        if row is None:
            return Miss(rules.FIRST_TURN, MissReason.FIRST_TURN, "")
        alive = self._engine_alive(row.worker_id, row.engine, now)
        if rules.may_take(row, request_id, now, engine_alive=alive):
            row = self._put(rules.taken(row, request_id, now))
            return Hit(row.take_turn, row, self._params[key])
        if rules.is_repeated_take(row, request_id, now):
            return Hit(row.take_turn, row, self._params[key])
        reason = rules.miss_reason(row, request_id, now, engine_alive=alive)
        row = self._put(rules.turn_opened(row, now, self._policy))
        worker = self._workers.get(row.worker_id)
        here = worker is not None and not worker.removed and worker.lease_expire_us > now
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
            engine_alive=self._engine_alive(commit.worker_id, commit.engine, now),
        )
        if not isinstance(verdict, rules.Stored):
            return verdict
        if old is None and self._is_full(commit.key.tenant):
            return TooManyConversations()
        if old is not None and verdict.release_old:
            self._release([old], ReleaseCause.SUPERSEDED, now)
        self._put(verdict.row)
        self._params[commit.key] = commit.params
        return verdict

    async def give_back(self, key: ConversationKey, handle_id: str, request_id: str) -> int | None:
        """See LedgerStore."""
        now = self._clock.now_us()
        row = rules.returned(self._rows.get(key), handle_id, request_id, now, self._policy)
        if row is None:
            return None
        self._put(row)
        if row.state is HandleState.RELEASED:
            self._release([row], ReleaseCause.ENDED, now)
        return row.revision

    async def end(self, key: ConversationKey) -> Ended:
        """See LedgerStore."""
        now = self._clock.now_us()
        old = self._rows.get(key)
        if old is None:
            if not self._is_full(key.tenant):
                self._put(rules.ended_before_first_turn(key, now, self._policy))
            return Ended(found=False, released=False)
        self._put(rules.ended(old, now, self._policy))
        released = old.state is HandleState.AVAILABLE
        if released:
            self._release([old], ReleaseCause.ENDED, now)
        return Ended(found=old.turn > 0, released=released)

    async def extend(
        self, key: ConversationKey, ttl_us: int
    ) -> Conversation | TtlNotHonoured | None:
        """See LedgerStore."""
        row = self._rows.get(key)
        if row is None or row.turn == 0:
            return None
        if ttl_us > rules.longest_ttl_us(row.engine_ttl_us, self._policy):
            return TtlNotHonoured(row.engine_ttl_us)
        return self._put(rules.extended(row, ttl_us, self._clock.now_us()))

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
            for row in self._rows.values()
            if row.key.tenant == tenant
            and row.turn > 0
            and (model is None or row.key.model == model)
            and (bound is None or position(row) > bound)
        ]
        return sorted(rows, key=position)[:limit]

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
        while self._due and self._due[0][0] <= now and len(expired) + spent + forgotten < limit:
            due, _, key = heapq.heappop(self._due)
            old = self._rows.get(key)
            if old is None or old.due_time_us != due:
                continue  # it was put off, and waits in the heap under another time
            new = rules.swept(old, now, self._policy)
            if new is None:
                self._forget(key)
                forgotten += 1
                continue
            self._put(new)
            if new.state is HandleState.EXPIRED:
                expired.append(old)
            else:
                spent += 1
        self._release(expired, ReleaseCause.EXPIRED, now)
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
        self._workers[worker.worker_id] = WorkerRecord(
            worker=worker,
            lease_id=lease_id,
            lease_ttl_us=lease_ttl_us,
            lease_expire_us=now + lease_ttl_us,
            removed=False,
            revision=self._next_registry_revision(),
        )
        return voided

    async def keep_alive(self, lease_id: str, state: WorkerState | None) -> Renewal | None:
        """See RegistryStore."""
        now = self._clock.now_us()
        record = self._by_lease(lease_id)
        if record is None or record.lease_expire_us <= now:
            return None
        renewed = replace(record, lease_expire_us=now + record.lease_ttl_us)
        state_changed = state is not None and state is not record.worker.state
        if state is not None and state_changed:
            worker = replace(record.worker, state=state)
            revision = self._next_registry_revision()
            renewed = replace(renewed, worker=worker, revision=revision)
        self._workers[record.worker.worker_id] = renewed
        return Renewal(record.lease_ttl_us, state_changed)

    async def end_lease(self, lease_id: str) -> str | None:
        """See RegistryStore."""
        record = self._by_lease(lease_id)
        if record is None:
            return None
        self._remove(record, self._clock.now_us())
        return record.worker.worker_id

    async def end_leases(self, limit: int) -> list[str]:
        """See RegistryStore."""
        now = self._clock.now_us()
        over = [record for record in self._with_lease() if record.lease_expire_us <= now][:limit]
        for record in over:
            self._remove(record, now)
        return [record.worker.worker_id for record in over]

    async def extend_leases(self) -> int:
        """See RegistryStore."""
        now = self._clock.now_us()
        records = list(self._with_lease())
        for record in records:
            self._workers[record.worker.worker_id] = replace(
                record, lease_expire_us=now + record.lease_ttl_us
            )
        return len(records)

    async def forget_workers(self, limit: int) -> int:
        """See RegistryStore."""
        before = self._clock.now_us() - self._policy.dead_retention_us
        gone = sorted(
            worker_id
            for worker_id, record in self._workers.items()
            if record.removed and record.lease_expire_us <= before
        )[:limit]
        for worker_id in gone:
            del self._workers[worker_id]
            self._log.forget_worker(worker_id)
        return len(gone)

    async def workers(
        self, model: str | None, role: WorkerRole | None, after: str, limit: int
    ) -> list[tuple[WorkerRecord, Retained]]:
        """See RegistryStore."""
        now = self._clock.now_us()
        records = [
            record
            for record in self._with_lease()
            if record.lease_expire_us > now
            and record.worker.worker_id > after
            and (model is None or record.worker.model == model)
            and (role is None or record.worker.role is role)
        ]
        return [(record, self._retained(record.worker)) for record in records[:limit]]

    async def registry(self) -> tuple[int, list[WorkerRecord]]:
        """See RegistryStore."""
        return self._registry_revision, list(self._with_lease())

    async def worker_changes(self, after_revision: int) -> list[WorkerRecord]:
        """See RegistryStore."""
        changed = (each for each in self._workers.values() if each.revision > after_revision)
        return sorted(changed, key=lambda record: record.revision)

    def _put(self, row: Conversation) -> Conversation:
        old = self._rows.get(row.key)
        if old is None:
            self._per_tenant[row.key.tenant] += 1
        if old is None or old.due_time_us != row.due_time_us:
            heapq.heappush(self._due, (row.due_time_us, next(self._tiebreak), row.key))
        self._rows[row.key] = row
        return row

    def _forget(self, key: ConversationKey) -> None:
        del self._rows[key]
        self._params.pop(key, None)
        self._per_tenant[key.tenant] -= 1

    def _is_full(self, tenant: str) -> bool:
        return self._per_tenant[tenant] >= self._policy.max_conversations

    def _release(self, rows: Iterable[Conversation], cause: ReleaseCause, now_us: int) -> None:
        for row in rows:
            self._log.write(row, self._params[row.key], cause, now_us)

    def _void(self, which: Callable[[Conversation], bool], now_us: int) -> int:
        rows = [row for row in self._rows.values() if row.state in LIVE_STATES and which(row)]
        for row in rows:
            self._put(rules.died(row, HandleState.VOID, now_us, self._policy))
        return len(rows)

    def _remove(self, record: WorkerRecord, now_us: int) -> None:
        worker = record.worker

        def held(row: Conversation) -> bool:
            return row.worker_id == worker.worker_id and row.engine == worker.engine

        unused = [
            row for row in self._rows.values() if row.state is HandleState.AVAILABLE and held(row)
        ]
        self._release(unused, ReleaseCause.LEASE_ENDED, now_us)
        self._void(held, now_us)
        self._workers[worker.worker_id] = replace(
            record, removed=True, lease_expire_us=now_us, revision=self._next_registry_revision()
        )

    def _next_registry_revision(self) -> int:
        self._registry_revision += 1
        return self._registry_revision

    def _engine_alive(self, worker_id: str, engine: EngineRef, now_us: int) -> bool:
        record = self._workers.get(worker_id)
        return (
            record is not None
            and not record.removed
            and record.lease_expire_us > now_us
            and record.worker.engine == engine
        )

    def _by_lease(self, lease_id: str) -> WorkerRecord | None:
        return next((each for each in self._with_lease() if each.lease_id == lease_id), None)

    def _with_lease(self) -> list[WorkerRecord]:
        return [
            self._workers[name] for name in sorted(self._workers) if not self._workers[name].removed
        ]

    def _retained(self, worker: Worker) -> Retained:
        held = [
            row.num_blocks
            for row in self._rows.values()
            if row.state is HandleState.AVAILABLE
            and row.worker_id == worker.worker_id
            and row.engine == worker.engine
        ]
        return Retained(len(held), sum(held))
