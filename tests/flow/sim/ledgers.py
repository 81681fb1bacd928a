"""A ledger and a registry that only remember, for sidecars under test."""

from __future__ import annotations

from kvloop.kvmeta.v1 import registry_pb2
from services.worker.ledger import Commit
from services.worker.registry import Lease


class RememberingLedger:
    """Takes every commit."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []

    async def commit(self, commit: Commit, *, timeout_seconds: float) -> float:
        """Store the handle."""
        self.commits.append(commit)
        return commit.engine_ttl_seconds


class RememberingRegistry:
    """Takes every worker."""

    def __init__(self) -> None:
        self.workers: list[registry_pb2.Worker] = []

    async def register(self, worker: registry_pb2.Worker, *, ttl_seconds: float) -> Lease:
        """Announce a worker."""
        copy = registry_pb2.Worker()
        copy.CopyFrom(worker)
        self.workers.append(copy)
        return Lease(f"lease-{len(self.workers)}", ttl_seconds)

    async def renew(self, lease_id: str, *, draining: bool) -> float:
        """Renew a lease."""
        return 60.0

    async def deregister(self, lease_id: str) -> None:
        """End a lease."""
