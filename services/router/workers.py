"""The live workers: who they are, how busy, and one open channel to each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field

import structlog

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import UnavailableError
from kvloop.kvmeta.v1 import registry_pb2
from kvloop.tls import TlsSource
from services.router.deadline import Clock
from services.router.failures import WORKER_UNREACHABLE
from services.router.policy import Candidate
from services.router.worker_client import GrpcWorkerClient, WorkerClient

_log = structlog.get_logger(__name__)

Connect = Callable[[registry_pb2.Worker], AbstractAsyncContextManager[WorkerClient]]
"""Opens a worker's channel; closed on exit."""


def connect_over_grpc(tls: TlsSource | None = None) -> Connect:
    """Connects to sidecars over gRPC, each on a channel of its own.

    Args:
        tls: how to speak TLS; without it nothing is encrypted.
    """

    @asynccontextmanager
    async def connect(worker: registry_pb2.Worker) -> AsyncIterator[WorkerClient]:
        async with rpc.open_channel(worker.address, tls) as channel:
            yield GrpcWorkerClient(worker.worker_id, channel)

    return connect


@dataclass(frozen=True)
class ModelWorkers:
    """The workers of one model that take turns now."""

    name: str
    prefill: list[registry_pb2.Worker]
    decode: list[registry_pb2.Worker]


@dataclass(eq=False)
class _Entry:
    """One life of one worker, with its channel."""

    worker: registry_pb2.Worker
    client: WorkerClient
    channel: AsyncExitStack
    in_flight: int = 0
    cooling_until: float | None = None
    unconfirmed_until: float | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def same_life(self, worker: registry_pb2.Worker) -> bool:
        mine = self.worker
        return (mine.address, mine.engine) == (worker.address, worker.engine)


class WorkerPool:
    """Keeps the set of workers that the registry reports.

    A worker that leaves is not given new turns, and its channel is closed when
    its last turn here has ended: a lost lease does not cut a stream that works.

    Args:
        tasks: owns the tasks that wait for those last turns.
        clock: seconds on a clock that never goes back.
        cooldown_seconds: how long a worker is avoided after it could not be reached.
        grace_seconds: how long a worker is kept that the registry has forgotten
            without saying that it left, as a registry does that has just started.
        connect: opens a worker's channel.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        clock: Clock,
        cooldown_seconds: float,
        grace_seconds: float,
        connect: Connect,
    ) -> None:
        self._clock = clock
        self._cooldown_seconds = cooldown_seconds
        self._grace_seconds = grace_seconds
        self._connect = connect
        self._entries: dict[str, _Entry] = {}
        self._tasks = tasks
        self._leaving: dict[_Entry, asyncio.Task[None]] = {}

    async def aclose(self) -> None:
        """Close every channel. Turns in flight are cut."""
        for task in self._leaving.values():
            task.cancel()
        for entry in [*self._leaving, *self._entries.values()]:
            await entry.channel.aclose()
        self._entries.clear()

    # What the registry says.

    async def put(self, worker: registry_pb2.Worker) -> None:
        """Add a worker, or take over what has changed about it."""
        entry = self._entries.get(worker.worker_id)
        if entry is not None and entry.same_life(worker):
            entry.worker = worker
            entry.unconfirmed_until = None
            return
        channel = AsyncExitStack()
        client = await channel.enter_async_context(self._connect(worker))
        self._entries[worker.worker_id] = _Entry(worker, client, channel)
        if entry is not None:
            self._close_when_idle(entry)
        _log.info(
            "worker_added",
            worker_id=worker.worker_id,
            role=common_pb2.WorkerRole.Name(worker.role),
            model=worker.model,
            address=worker.address,
        )

    def remove(self, worker_id: str) -> None:
        """Give the worker no new turns."""
        entry = self._entries.pop(worker_id, None)
        if entry is not None:
            self._close_when_idle(entry)
            _log.info("worker_removed", worker_id=worker_id)

    def keep_only(self, confirmed: set[str]) -> None:
        """Forget, after a grace period, the workers that are not confirmed."""
        now = self._clock()
        for worker_id, entry in self._entries.items():
            if worker_id not in confirmed and entry.unconfirmed_until is None:
                entry.unconfirmed_until = now + self._grace_seconds

    # What the turns ask.

    def candidates(self, model: str, role: common_pb2.WorkerRole.ValueType) -> list[Candidate]:
        """The model's live workers of one role, also those that take no turns."""
        return [
            self._candidate(entry)
            for entry in self._live()
            if entry.worker.model == model and entry.worker.role == role
        ]

    def all(self) -> dict[str, Candidate]:
        """Every live worker by its id."""
        return {entry.worker.worker_id: self._candidate(entry) for entry in self._live()}

    def find(self, worker_id: str) -> Candidate | None:
        """One live worker, or None."""
        self._forget_unconfirmed()
        entry = self._entries.get(worker_id)
        return self._candidate(entry) if entry is not None else None

    def models(self) -> list[ModelWorkers]:
        """Every model that some worker takes turns for, sorted by name."""
        found: dict[str, ModelWorkers] = {}
        for entry in self._live():
            worker = entry.worker
            model = found.setdefault(worker.model, ModelWorkers(worker.model, [], []))
            if self._candidate(entry).takes_turns:
                is_prefill = worker.role == common_pb2.WORKER_ROLE_PREFILL
                (model.prefill if is_prefill else model.decode).append(worker)
        return [found[name] for name in sorted(found)]

    @contextmanager
    def use(self, worker_id: str) -> Iterator[WorkerClient]:
        """The worker's client, counted as one turn in flight while the block runs.

        Raises:
            UnavailableError: reason WORKER_UNREACHABLE; the worker has left.
        """
        entry = self._entries.get(worker_id)
        if entry is None:
            raise UnavailableError(
                f"worker {worker_id} has left", reason=WORKER_UNREACHABLE, worker_id=worker_id
            )
        entry.in_flight += 1
        entry.idle.clear()
        try:
            yield entry.client
        finally:
            entry.in_flight -= 1
            if entry.in_flight == 0:
                entry.idle.set()

    def cool_down(self, worker_id: str) -> None:
        """Avoid the worker for a while: it could not be reached."""
        entry = self._entries.get(worker_id)
        if entry is not None:
            entry.cooling_until = self._clock() + self._cooldown_seconds
            _log.warning("worker_cooling", worker_id=worker_id, seconds=self._cooldown_seconds)

    def _candidate(self, entry: _Entry) -> Candidate:
        cooling = entry.cooling_until is not None and self._clock() < entry.cooling_until
        return Candidate(entry.worker, in_flight=entry.in_flight, reachable=not cooling)

    def _live(self) -> list[_Entry]:
        self._forget_unconfirmed()
        return list(self._entries.values())

    def _forget_unconfirmed(self) -> None:
        now = self._clock()
        for worker_id, entry in list(self._entries.items()):
            if entry.unconfirmed_until is not None and now >= entry.unconfirmed_until:
                self.remove(worker_id)

    def _close_when_idle(self, entry: _Entry) -> None:
        async def close() -> None:
            if entry.in_flight:
                await entry.idle.wait()
            await entry.channel.aclose()

        name = f"close channel of {entry.worker.worker_id}"
        task = self._leaving[entry] = self._tasks.create_task(close(), name=name)
        task.add_done_callback(lambda _: self._leaving.pop(entry, None))
