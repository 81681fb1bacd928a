"""Workers and their leases in memory."""

from __future__ import annotations

from dataclasses import replace

from services.kvmeta.model import Conversation, EngineRef, Worker, WorkerRecord
from services.kvmeta.store import Forgotten


class MemoryWorkers:
    """Workers with a lease, and those removed that watchers have yet to see.

    Args:
        first_revision: above every revision that an earlier registry gave out, so
            that a watcher of that one finds its position out of range.
    """

    def __init__(self, first_revision: int) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._revision = first_revision
        self._floor = first_revision

    @property
    def revision(self) -> int:
        """Revision of the last change."""
        return self._revision

    def add(self, worker: Worker, lease_id: str, lease_ttl_us: int, now_us: int) -> None:
        """Store the worker under a new lease."""
        known = self._records.get(worker.worker_id)
        revision = self._next_revision()
        self._records[worker.worker_id] = WorkerRecord(
            worker=worker,
            lease_id=lease_id,
            lease_ttl_us=lease_ttl_us,
            lease_expire_us=now_us + lease_ttl_us,
            removed=False,
            added_revision=revision if known is None or known.removed else known.added_revision,
            revision=revision,
        )

    def renew(self, record: WorkerRecord, now_us: int) -> None:
        """Give the record's lease a full period from now."""
        renewed = replace(record, lease_expire_us=now_us + record.lease_ttl_us)
        self._records[record.worker.worker_id] = renewed

    def change(self, worker: Worker) -> None:
        """Store another state of a worker."""
        known = self._records[worker.worker_id]
        changed = replace(known, worker=worker, revision=self._next_revision())
        self._records[worker.worker_id] = changed

    def remove(self, record: WorkerRecord, now_us: int) -> None:
        """End the record's lease; the worker stays as a change to be seen."""
        self._records[record.worker.worker_id] = replace(
            record, removed=True, lease_expire_us=now_us, revision=self._next_revision()
        )

    def forget(self, limit: int, removed_before_us: int) -> list[str]:
        """Delete workers that were removed long ago; their ids."""
        gone = sorted(
            worker_id
            for worker_id, record in self._records.items()
            if record.removed and record.lease_expire_us <= removed_before_us
        )[:limit]
        for worker_id in gone:
            self._floor = max(self._floor, self._records.pop(worker_id).revision)
        return gone

    def changes(self, after_revision: int) -> list[WorkerRecord] | Forgotten:
        """See RegistryStore.worker_changes."""
        if after_revision > 0 and not self._floor <= after_revision <= self._revision:
            return Forgotten()
        changed = (each for each in self._records.values() if each.revision > after_revision)
        return sorted(changed, key=lambda record: record.revision)

    def by_lease(self, lease_id: str) -> WorkerRecord | None:
        """The worker under a lease, if it was not removed."""
        return next((each for each in self.with_lease() if each.lease_id == lease_id), None)

    def with_lease(self) -> list[WorkerRecord]:
        """Workers that were not removed, by id."""
        return [
            self._records[name] for name in sorted(self._records) if not self._records[name].removed
        ]

    def is_here(self, worker_id: str, now_us: int) -> bool:
        """Whether the worker holds a lease, for whatever life of its engine."""
        record = self._records.get(worker_id)
        return record is not None and not record.removed and record.lease_expire_us > now_us

    def engine_alive(self, worker_id: str, engine: EngineRef, now_us: int) -> bool:
        """Whether the worker holds a lease for this life of its engine."""
        known = self._records.get(worker_id)
        return (
            known is not None and self.is_here(worker_id, now_us) and known.worker.engine == engine
        )

    def block_bytes(self, row: Conversation) -> int:
        """Memory of one block of the engine that holds a row's blocks; 0 if unknown."""
        record = self._records.get(row.worker_id)
        if record is None or record.worker.engine != row.engine:
            return 0
        return record.worker.traits.kv_block_bytes

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision
