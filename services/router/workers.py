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
from dataclasses import dataclass
from functools import cached_property

import structlog

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import UnavailableError
from kvloop.kvmeta.v1 import registry_pb2
from kvloop.tls import TlsSource
from services.router.breaker import BreakerLimits, BreakerState
from services.router.candidates import Candidate, Roster
from services.router.deadline import Clock
from services.router.failures import WORKER_UNREACHABLE
from services.router.policy import TurnFacts
from services.router.speeds import SpeedLines
from services.router.worker_client import GrpcWorkerClient, WorkerClient
from services.router.worker_life import WorkerLife
from services.router.worker_load import DecodeLoad, PrefillLoad, WorkerLoad

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
            client = GrpcWorkerClient(worker.worker_id, channel)
            try:
                yield client
            finally:
                client.expect_no_more()

    return connect


@dataclass(frozen=True)
class ModelWorkers:
    """The workers of one model that take turns now."""

    name: str
    prefill: list[registry_pb2.Worker]
    decode: list[registry_pb2.Worker]

    @cached_property
    def context_limit(self) -> int:
        """Tokens that prompt and answer may have together on every one of the workers.

        0 if no worker says.
        """
        said = (worker.traits.max_model_len for worker in (*self.prefill, *self.decode))
        return min((tokens for tokens in said if tokens), default=0)


class WorkerPool:
    """Keeps the set of workers that the registry reports.

    A worker that leaves is not given new turns, and its channel is closed when
    its last turn here has ended: a lost lease does not cut a stream that works.

    Args:
        tasks: owns the tasks that wait for those last turns.
        clock: seconds on a clock that never goes back.
        breakers: when workers are avoided that could not be reached, or failed.
        grace_seconds: how long a worker is kept that the registry has forgotten
            without saying that it left, as a registry does that has just started.
        connect: opens a worker's channel.
        breaker_opened: told when a worker's breaker opens.
        changed: told when `can_serve` may have changed, or `forgets_in` has.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        clock: Clock,
        breakers: BreakerLimits,
        grace_seconds: float,
        connect: Connect,
        breaker_opened: Callable[[], None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._breakers = breakers
        self._grace_seconds = grace_seconds
        self._connect = connect
        self._breaker_opened = breaker_opened
        self._changed = changed
        self._lives: dict[str, WorkerLife] = {}
        self._unconfirmed: dict[str, WorkerLife] = {}
        self._tripped: dict[str, WorkerLife] = {}  # whose breaker is not closed
        self._speeds: dict[str, SpeedLines] = {}  # by model
        # Made when somebody asks, until something changes: a turn asks several times.
        self._rosters: dict[tuple[str, int], Roster] = {}  # by model and role
        self._models: list[ModelWorkers] | None = None
        self._tasks = tasks
        self._leaving: dict[WorkerLife, asyncio.Task[None]] = {}

    async def aclose(self) -> None:
        """Close every channel. Turns in flight are cut."""
        for task in self._leaving.values():
            task.cancel()
        for life in [*self._leaving, *self._lives.values()]:
            await life.channel.aclose()
        self._lives.clear()

    @property
    def channels(self) -> int:
        """Open channels, those to workers that have left included."""
        return len(self._lives) + len(self._leaving)

    # What the registry says.

    async def put(self, worker: registry_pb2.Worker) -> None:
        """Add a worker, or take over what has changed about it."""
        known = self._lives.get(worker.worker_id)
        if known is not None and known.is_of(worker):
            known.candidate.registered(worker)
            known.unconfirmed_until = None
            self._unconfirmed.pop(worker.worker_id, None)
            self._roster_changed()
            return
        channel = AsyncExitStack()
        client = await channel.enter_async_context(self._connect(worker))
        self._lives[worker.worker_id] = WorkerLife(
            Candidate(worker, load=self._new_load(worker)),
            client,
            channel,
            clock=self._clock,
            limits=self._breakers,
            breaker_changed=self._breaker_changed,
            breaker_opened=self._breaker_opened,
            leaves=self._roster_changed,
        )
        self._roster_changed()
        if known is not None:
            self._retire(known)
        _log.info(
            "worker_added",
            worker_id=worker.worker_id,
            role=common_pb2.WorkerRole.Name(worker.role),
            model=worker.model,
            address=worker.address,
        )

    def remove(self, worker_id: str) -> None:
        """Give the worker no new turns."""
        life = self._lives.pop(worker_id, None)
        if life is not None:
            self._roster_changed()
            self._retire(life)
            _log.info("worker_removed", worker_id=worker_id)

    def keep_only(self, confirmed: set[str]) -> None:
        """Forget, after a grace period, the workers that are not confirmed."""
        now = self._clock()
        for worker_id, life in self._lives.items():
            if worker_id not in confirmed and life.unconfirmed_until is None:
                life.unconfirmed_until = now + self._grace_seconds
                self._unconfirmed[worker_id] = life
        self._changed()

    @property
    def forgets_in(self) -> float | None:
        """Seconds until a worker is forgotten that is not confirmed; None if all are."""
        ends = (life.unconfirmed_until for life in self._unconfirmed.values())
        first = min((end for end in ends if end is not None), default=None)
        return None if first is None else max(first - self._clock(), 0.0)

    # What the turns ask.

    def candidates(self, model: str, role: common_pb2.WorkerRole.ValueType) -> Roster:
        """The model's live workers of one role, also those that take no turns."""
        self._catch_up()
        roster = self._rosters.get((model, role))
        if roster is None:
            roster = self._rosters[model, role] = Roster(
                candidate
                for candidate in (life.candidate for life in self._lives.values())
                if candidate.worker.model == model and candidate.worker.role == role
            )
        return roster

    def all(self) -> dict[str, Candidate]:
        """Every live worker by its id."""
        self._catch_up()
        return {worker_id: life.candidate for worker_id, life in self._lives.items()}

    def find(self, worker_id: str) -> Candidate | None:
        """One live worker, or None."""
        self._catch_up()
        life = self._lives.get(worker_id)
        return life.candidate if life is not None else None

    def models(self) -> list[ModelWorkers]:
        """Every model that some worker takes turns for, sorted by name."""
        self._catch_up()
        if self._models is None:
            found: dict[str, ModelWorkers] = {}
            for candidate in (life.candidate for life in self._lives.values()):
                worker = candidate.worker
                model = found.setdefault(worker.model, ModelWorkers(worker.model, [], []))
                if candidate.takes_turns:
                    is_prefill = worker.role == common_pb2.WORKER_ROLE_PREFILL
                    (model.prefill if is_prefill else model.decode).append(worker)
            self._models = [found[name] for name in sorted(found)]
        return self._models

    @property
    def can_serve(self) -> bool:
        """Whether some model has a decode worker that takes turns, without which none is served."""
        return any(model.decode for model in self.models())

    def breakers(self, state: BreakerState) -> int:
        """Workers whose breaker is in that state now. Changes nothing: any thread may ask."""
        now = self._clock()
        return sum(life.breaker.state(now) is state for life in list(self._lives.values()))

    @contextmanager
    def use(
        self, worker_id: str, facts: TurnFacts | None = None, *, is_leg: bool = True
    ) -> Iterator[WorkerClient]:
        """The worker's client, counted as one turn in flight while the block runs.

        How the block ends tells the worker's breaker how the worker is.

        Args:
            worker_id: the worker.
            facts: of the turn, if its leg's durations say how busy the worker is; see
                `prefilled` and `first_chunk`.
            is_leg: whether a leg runs there. Other calls say nothing of the engine's
                health, except that it cannot be reached.

        Raises:
            UnavailableError: reason WORKER_UNREACHABLE; the worker has left.
        """
        life = self._lives.get(worker_id)
        if life is None:
            raise UnavailableError(
                f"worker {worker_id} has left", reason=WORKER_UNREACHABLE, worker_id=worker_id
            )
        with life.use(facts, is_leg=is_leg) as client:
            yield client

    def client_of(self, worker_id: str) -> WorkerClient | None:
        """The worker's client, for what may get lost: nothing waits for it. None: it has left."""
        life = self._lives.get(worker_id)
        return life.client if life is not None else None

    def prefilled(self, worker_id: str, facts: TurnFacts, report: common_pb2.PrefillReport) -> None:
        """Learn from a prefill leg in `use` that has ended well."""
        if (life := self._lives.get(worker_id)) is not None:
            life.prefilled(facts, report)

    def first_chunk(self, worker_id: str, facts: TurnFacts) -> None:
        """Learn from a decode leg in `use` whose first chunk has come."""
        if (life := self._lives.get(worker_id)) is not None:
            life.first_chunk(facts)

    def _new_load(self, worker: registry_pb2.Worker) -> WorkerLoad:
        speeds = self._speeds.setdefault(worker.model, SpeedLines())
        is_prefill = worker.role == common_pb2.WORKER_ROLE_PREFILL
        return PrefillLoad(speeds) if is_prefill else DecodeLoad(speeds)

    def _breaker_changed(self, life: WorkerLife) -> None:
        if life.see(self._clock()):
            self._rosters.clear()
        if self._lives.get(life.worker_id) is not life:
            return  # the name's breaker is that of another life
        if life.breaker.open_until is None:
            self._tripped.pop(life.worker_id, None)
        else:
            self._tripped[life.worker_id] = life

    def _catch_up(self) -> None:
        """Let the time that has passed take effect."""
        if self._unconfirmed or self._tripped:
            now = self._clock()
            for worker_id, life in list(self._unconfirmed.items()):
                if life.unconfirmed_until is not None and now >= life.unconfirmed_until:
                    self.remove(worker_id)
            for life in self._tripped.values():
                if life.see(now):
                    self._rosters.clear()

    def _roster_changed(self) -> None:
        self._rosters.clear()
        self._models = None
        self._changed()

    def _retire(self, life: WorkerLife) -> None:
        """Let a life's turns go on to their end, then close its channel."""
        self._unconfirmed.pop(life.worker_id, None)
        self._tripped.pop(life.worker_id, None)
        life.client.expect_no_more()

        async def close() -> None:
            await life.idle.wait()
            await life.channel.aclose()

        task = self._tasks.create_task(close(), name=f"close channel of {life.worker_id}")
        self._leaving[life] = task
        task.add_done_callback(lambda _: self._leaving.pop(life, None))
