"""The log of releases in memory."""

from __future__ import annotations

from itertools import islice

from services.kvmeta.deadlines import Policy
from services.kvmeta.model import Conversation, Handle, Release, ReleaseCause
from services.kvmeta.store import Forgotten


class MemoryReleases:
    """Releases of all workers, the last revision, and what was deleted.

    Args:
        policy: gives the retention.
        first_revision: above every revision that an earlier log gave out.
    """

    def __init__(self, policy: Policy, first_revision: int) -> None:
        self._policy = policy
        self._entries: list[tuple[int, Release]] = []
        self._revision = self._first_revision = first_revision
        self._floors: dict[str, int] = {}

    def write(self, row: Conversation, params: bytes, cause: ReleaseCause, now_us: int) -> None:
        """Log a release of the conversation's handle, if its engine still holds it."""
        if row.drop_time_us <= now_us:
            return
        self._revision += 1
        handle = Handle(
            handle_id=row.handle_id,
            worker_id=row.worker_id,
            engine=row.engine,
            turn=row.turn,
            params=params,
            num_tokens=row.num_tokens,
            num_blocks=row.num_blocks,
            deadline_extension_us=row.deadline_extension_us,
        )
        due = row.drop_time_us + self._policy.release_retention_us
        self._entries.append((due, Release(self._revision, handle, cause)))

    def after(self, worker_id: str, after_revision: int, limit: int) -> list[Release] | Forgotten:
        """See LedgerStore.releases."""
        floor = self._floors.get(worker_id, self._first_revision)
        if after_revision > 0 and not floor <= after_revision <= self._revision:
            return Forgotten()
        found = (
            release
            for _, release in self._entries
            if release.handle.worker_id == worker_id and release.revision > after_revision
        )
        return list(islice(found, limit))

    def forget(self, limit: int, now_us: int) -> int:
        """Delete what is past its retention; how many were deleted."""
        due = sorted(
            (entry for entry in self._entries if entry[0] <= now_us),
            key=lambda entry: (entry[0], entry[1].revision),
        )[:limit]
        gone = {release.revision for _, release in due}
        self._entries = [entry for entry in self._entries if entry[1].revision not in gone]
        for _, release in due:
            worker_id = release.handle.worker_id
            self._floors[worker_id] = max(release.revision, self._floors.get(worker_id, 0))
        return len(due)

    def forget_worker(self, worker_id: str) -> None:
        """Drop what was kept about a worker that is gone for good."""
        self._floors.pop(worker_id, None)
