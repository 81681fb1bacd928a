"""Makes room when retained KV takes too much of the engine's memory, and gives up
conversations whose next turn is overdue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from kvloop.errors import KvloopError
from services.common.backoff import Backoff
from services.worker.budget import (
    BlockShares,
    BlockUse,
    Candidate,
    RetentionPolicy,
    Shortage,
    blocks_to_free,
    choose,
)
from services.worker.clock import Clock
from services.worker.engine import Engine
from services.worker.event_hub import EventHub
from services.worker.event_messages import Hello, Message, Pressure
from services.worker.gaps import Outlook
from services.worker.horizon import horizon_seconds, kept_anyway
from services.worker.metrics import WorkerMetrics
from services.worker.pin_ledger import PinLedger
from services.worker.pins import Pin, ReleaseCause, Standing
from services.worker.race import wait_or_sleep

_log = structlog.get_logger(__name__)

_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 2.0
_ASKED_FOR_MORE_SECONDS = 1.0
_OVERDUE = "overdue"
"""Label of evictions: a next turn has become unlikely."""


@dataclass(frozen=True)
class RoomRules:
    """How much retained KV may take, and what goes first."""

    shares: BlockShares
    policy: RetentionPolicy
    poll_seconds: float
    """How often the engine's free blocks are looked at while it works."""
    lost_share: float = 0.0
    """Share of next turns that may come after their conversation was given up; 0:
    none is given up before its TTL."""


class RoomKeeper:
    """The loop that frees what is retained when memory runs short.

    The ledger takes the handles back first; what it has given out meanwhile is left
    alone. When the ledger cannot be reached, nothing is freed here, and pins fall at
    their lease.

    Args:
        hub: knows the pins and reaches the engine. Its messages must be passed to
            `notice`.
        ledger: takes handles back.
        engine: says how many blocks are free.
        working: whether legs run, that is whether free blocks may run low.
        clock: paces looking.
        metrics: counts evictions.
        rules: how much, and what first.
    """

    def __init__(
        self,
        hub: EventHub,
        ledger: PinLedger,
        engine: Engine,
        *,
        working: Callable[[], bool],
        clock: Clock,
        metrics: WorkerMetrics,
        rules: RoomRules,
    ) -> None:
        self._hub = hub
        self._ledger = ledger
        self._engine = engine
        self._working = working
        self._clock = clock
        self._metrics = metrics
        self._rules = rules
        self._wake = asyncio.Event()
        self._waited_for = 0

    def notice(self, message: Message) -> None:
        """Take in what the engine has sent."""
        hello = self._hub.identity
        if isinstance(message, Pressure):
            self._waited_for = max(self._waited_for, message.blocks_needed)
            self._wake.set()
        elif hello is not None and blocks_to_free(self._use(hello), self._rules.shares):
            self._wake.set()

    async def run(self) -> None:
        """Make room whenever it is needed, until cancelled."""
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS)
        while True:
            await wait_or_sleep(self._wake, self._clock, self._rules.poll_seconds)
            looks = not self._wake.is_set()
            self._wake.clear()
            try:
                await self._step(looks)
                backoff.reset()
            except KvloopError as error:
                _log.warning("no_room_made", reason=error.reason, error=error.message)
                await self._clock.sleep(backoff.next_seconds())

    async def _step(self, looks: bool) -> None:
        hello = self._hub.identity
        waited_for, self._waited_for = self._waited_for, 0
        if hello is None or not len(self._hub.pins):
            return
        if looks and self._rules.lost_share:
            await self._give_up(hello)
        free = None
        if looks and self._working():
            gauges = await self._engine.gauges()
            free = round((1 - gauges.kv_cache_usage) * hello.num_kv_blocks)
        lacking = blocks_to_free(self._use(hello, free, waited_for), self._rules.shares)
        if lacking is not None:
            await self._evict(hello, *lacking)

    def _use(self, hello: Hello, free: int | None = None, waited_for: int = 0) -> BlockUse:
        pins = self._hub.pins
        return BlockUse(
            total=hello.num_kv_blocks,
            retained=pins.retained_blocks - pins.releasing_blocks,
            coming_free=pins.releasing_blocks,
            free=free,
            waited_for=waited_for,
        )

    async def _evict(self, hello: Hello, num_blocks: int, shortage: Shortage) -> None:
        candidates = {candidate.turn_id: candidate for candidate in self._candidates()}
        freed = 0
        while freed < num_blocks:
            chosen = choose(list(candidates.values()), num_blocks - freed, self._rules.policy)
            if not chosen:
                break
            turn_ids = [candidate.turn_id for candidate in chosen]
            freed += await self._take_back(hello, turn_ids, shortage)
            for turn_id in turn_ids:
                del candidates[turn_id]
        if freed:
            _log.info("room_made", shortage=shortage, wanted_blocks=num_blocks, freed_blocks=freed)

    async def _give_up(self, hello: Hello) -> None:
        """Free what has been silent beyond its tenant's horizon."""
        now, ttl_seconds = self._clock.monotonic(), hello.decoder_kv_blocks_ttl
        horizons: dict[str, float] = {}
        overdue: list[str] = []
        for pin in self._hub.pins:
            if self._is_spoken_for(pin) or pin.standing is not Standing.WANTED:
                continue
            # A conversation that asked for more than the engine's TTL means it.
            asked_for = (pin.wanted_until or now) - pin.ended_at
            if asked_for > ttl_seconds + _ASKED_FOR_MORE_SECONDS or kept_anyway(pin.turn_id):
                continue
            if pin.tenant not in horizons:
                horizons[pin.tenant] = horizon_seconds(
                    self._hub.pins.pauses.outlook(pin.tenant),
                    ttl_seconds=ttl_seconds,
                    lost_share=self._rules.lost_share,
                )
            if now - pin.ended_at > horizons[pin.tenant]:
                overdue.append(pin.turn_id)
        if overdue:
            await self._take_back(hello, overdue, _OVERDUE)

    async def _take_back(self, hello: Hello, turn_ids: list[str], reason: str) -> int:
        """Blocks freed of turns that the ledger had not given out."""
        evicted = await self._ledger.evict(hello.ref, turn_ids)
        pins = [pin for pin in map(self._hub.pins.of_turn, evicted) if pin is not None]
        self._hub.release(hello.ref, [pin.request_id for pin in pins], ReleaseCause.BUDGET)
        self._metrics.evictions.labels(reason=reason).inc(len(pins))
        return sum(pin.num_blocks for pin in pins)

    def _is_spoken_for(self, pin: Pin) -> bool:
        """True if a pin is not this loop's to free."""
        theirs = not pin.turn_id or pin.standing in (Standing.IN_USE, Standing.ORPHAN)
        return theirs or pin.in_hand or pin.releasing

    def _candidates(self) -> Iterator[Candidate]:
        now = self._clock.monotonic()
        outlooks: dict[str, Outlook] = {}
        for pin in self._hub.pins:
            if self._is_spoken_for(pin):
                continue
            if pin.tenant not in outlooks:
                outlooks[pin.tenant] = self._hub.pins.pauses.outlook(pin.tenant)
            silent = max(now - pin.ended_at, 0.0)
            until = pin.deadline if pin.wanted_until is None else pin.wanted_until
            yield Candidate(
                pin.turn_id,
                pin.num_blocks,
                pin.num_tokens,
                silent_seconds=silent,
                chance=outlooks[pin.tenant].chance(silent, until - now),
            )
