"""A worker pool without a network, on a clock that tests move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvloop.errors import KvloopError, UnavailableError
from kvloop.kvmeta.v1 import registry_pb2
from services.router.breaker import BreakerLimits
from services.router.workers import WorkerPool
from tests.flow.router.stack import PREFILL


@dataclass
class Client:
    """A worker's client that no leg runs on."""

    name: str
    expects_more: bool = True

    def expect_no_more(self) -> None:
        """As WorkerClient has it."""
        self.expects_more = False


class Harness:
    """A pool whose channels are entries of a list."""

    def __init__(self, tasks: asyncio.TaskGroup, grace_seconds: float) -> None:
        self.now = 100.0
        self.open: list[str] = []
        self.clients: list[Client] = []
        self.openings = 0
        self.changed = asyncio.Event()
        self.pool = WorkerPool(
            tasks,
            clock=lambda: self.now,
            breakers=BreakerLimits(failures=3, cooldown_seconds=5, max_cooldown_seconds=20),
            grace_seconds=grace_seconds,
            connect=self._connect,  # type: ignore[arg-type]
            breaker_opened=self._opened,
            changed=self.changed.set,
        )

    @asynccontextmanager
    async def _connect(self, worker: registry_pb2.Worker) -> AsyncIterator[Client]:
        name = f"{worker.worker_id}@{worker.address}/{worker.engine.epoch}"
        self.open.append(name)
        self.clients.append(Client(name))
        yield self.clients[-1]
        self.open.remove(name)

    def _opened(self) -> None:
        self.openings += 1

    def fail(self, worker_id: str, error: KvloopError | None = None) -> None:
        """Let a turn fail there."""
        error = error or UnavailableError("", reason="WORKER_UNREACHABLE")
        with pytest.raises(type(error)), self.pool.use(worker_id):
            raise error

    def prefill_ids(self) -> list[str]:
        return [c.worker_id for c in self.pool.candidates("tiny", PREFILL)]


@asynccontextmanager
async def harness(grace_seconds: float = 10) -> AsyncIterator[Harness]:
    async with asyncio.TaskGroup() as tasks:
        made = Harness(tasks, grace_seconds)
        yield made
        await made.pool.aclose()
