"""One life of one worker in this router: its channel, its breaker, its legs in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field

import structlog

from kvloop.common.v1 import common_pb2
from kvloop.errors import KvloopError
from kvloop.kvmeta.v1 import registry_pb2
from services.router.breaker import Breaker, BreakerLimits
from services.router.candidates import Candidate
from services.router.deadline import Clock
from services.router.failures import (
    is_down_for_all,
    is_leaving,
    is_the_workers_fault,
    worker_is_down,
)
from services.router.policy import TurnFacts
from services.router.worker_client import WorkerClient
from services.router.worker_load import DecodeLoad, Leg, PrefillLoad

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Use:
    """A leg in flight, and the breaker's generation when it began."""

    leg: Leg
    generation: int


@dataclass(eq=False)
class WorkerLife:
    """See the module. Made by the pool, for each address and engine of a worker."""

    candidate: Candidate
    """What policies see of it."""
    client: WorkerClient
    channel: AsyncExitStack
    clock: Clock
    limits: BreakerLimits
    breaker_changed: Callable[[WorkerLife], None]
    """Told after each change of the breaker."""
    breaker_opened: Callable[[], None]
    """Told when it opens."""
    leaves: Callable[[], None]
    """Told when it has said that it takes no more turns."""
    breaker: Breaker = field(default_factory=Breaker)
    unconfirmed_until: float | None = None
    """When it is forgotten unless the registry lists it again."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nothing is in flight."""
    _legs: dict[TurnFacts, _Use] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def worker_id(self) -> str:
        """Name of the worker."""
        return self.candidate.worker_id

    def is_of(self, worker: registry_pb2.Worker) -> bool:
        """Whether that registration is of this life."""
        mine = self.candidate.worker
        return (mine.address, mine.engine) == (worker.address, worker.engine)

    def see(self, now: float) -> bool:
        """Let policies see the breaker as it is now.

        Returns:
            Whether the worker can be reached again, or no more.
        """
        was_reachable = self.candidate.reachable
        self.candidate.breaker = self.breaker.state(now)
        self.candidate.reachable = self.breaker.admits(now)
        return self.candidate.reachable is not was_reachable

    @contextmanager
    def use(self, facts: TurnFacts | None, *, is_leg: bool) -> Iterator[WorkerClient]:
        """See `WorkerPool.use`."""
        generation = self.breaker.generation
        probe = is_leg and self.breaker.is_probe(self.clock())
        if probe:
            self._set(self.breaker.probe_started())
        self._enter(facts, generation)
        try:
            yield self.client
        except KvloopError as error:
            self._judge(error, generation, is_leg=is_leg)
            raise
        else:
            if is_leg:
                self._went_well(self.breaker.succeeded(generation))
        finally:
            self._leave(facts)
            if probe and self.breaker.generation == generation:  # without a verdict
                self._set(self.breaker.probe_abandoned())

    def prefilled(self, facts: TurnFacts, report: common_pb2.PrefillReport) -> None:
        """See `WorkerPool.prefilled`."""
        use, load = self._legs.pop(facts, None), self.candidate.load
        if use is not None and isinstance(load, PrefillLoad):
            load.ended(use.leg, self.clock(), report)

    def first_chunk(self, facts: TurnFacts) -> None:
        """See `WorkerPool.first_chunk`."""
        use, load = self._legs.pop(facts, None), self.candidate.load
        if use is not None and isinstance(load, DecodeLoad):
            load.first_chunk(use.leg, self.clock())
            # The answer may last for minutes, and other turns need not wait for it.
            self._went_well(self.breaker.answered(use.generation))

    def _enter(self, facts: TurnFacts | None, generation: int) -> None:
        candidate = self.candidate
        if facts is not None:
            is_decode = isinstance(candidate.load, DecodeLoad)
            leg = candidate.load.started(
                self.clock(),
                prompt=facts.prompt_tokens,
                held=facts.tokens_at(self.worker_id) if is_decode else facts.pullable,
                in_flight=candidate.in_flight,
                cached=facts.cached_at(self.worker_id),
            )
            self._legs[facts] = _Use(leg, generation)
        candidate.in_flight += 1
        self.idle.clear()

    def _leave(self, facts: TurnFacts | None) -> None:
        use = self._legs.pop(facts, None) if facts is not None else None
        if use is not None:
            self.candidate.load.gave_up(use.leg, self.clock())
        self.candidate.in_flight -= 1
        if self.candidate.in_flight == 0:
            self.idle.set()

    def _judge(self, error: KvloopError, generation: int, *, is_leg: bool) -> None:
        """What a failed call says of the worker: often nothing."""
        if is_leaving(error):
            # It is well, and what it holds can be pulled. The registry will say so too.
            self.candidate.takes_turns = False
            self.leaves()
            return
        certain = is_down_for_all(error)
        if not (certain or (is_leg and (worker_is_down(error) or is_the_workers_fault(error)))):
            return
        before, now = self.breaker, self.clock()
        self._set(before.failed(now, generation, self.limits, certain=certain))
        if self.breaker.generation > before.generation:
            self.breaker_opened()
            _log.warning(
                "breaker_opened",
                worker_id=self.worker_id,
                reason=error.reason,
                failures=self.breaker.failures,
                seconds=self.limits.cooldown(self.breaker.openings),
            )

    def _went_well(self, breaker: Breaker) -> None:
        was_closed = self.breaker.open_until is None
        self._set(breaker)
        if not was_closed and breaker.open_until is None:
            _log.info("breaker_closed", worker_id=self.worker_id)

    def _set(self, breaker: Breaker) -> None:
        if breaker != self.breaker:
            self.breaker = breaker
            self.breaker_changed(self)
