"""Long tasks: what the passing of time does to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import structlog

from kvloop.errors import UnavailableError
from services.kvmeta.bell import Bell
from services.kvmeta.clock import Clock, LedgerClock, Marks
from services.kvmeta.metrics import KvmetaMetrics
from services.kvmeta.model import MICROSECONDS
from services.kvmeta.store import Store

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_HUNG_US = MICROSECONDS
"""A call that takes longer means that renewals may have waited as well."""
_AWAY_RETRY_SECONDS = 0.25
"""How often a store that was away is asked again."""


class Sweeper:
    """Expires handles, ends leases and forgets old rows, in bounded batches.

    Nothing depends on it for correctness: a take checks the deadline and the
    lease itself. While the store is away nobody can renew a lease, so each gets a
    full period when the store is back.

    Args:
        store: what is swept.
        clock: the ledger's clock.
        batch_rows: rows that one transaction changes.
        changed: rung when a lease ended.
        released: rung when releases were written.
        metrics: counts what was done.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        batch_rows: int,
        changed: Bell,
        released: Bell,
        metrics: KvmetaMetrics,
    ) -> None:
        self._store = store
        self._clock = clock
        self._was_away = False
        self._metrics = metrics
        self._batch_rows = batch_rows
        self._changed = changed
        self._released = released

    async def run(self, interval_seconds: float) -> None:
        """Sweep for ever. A database that is away is asked again soon."""
        while True:
            try:
                await self.sweep()
            except UnavailableError:
                _log.warning("sweep_postponed")
            retry_seconds = min(_AWAY_RETRY_SECONDS, interval_seconds)
            await asyncio.sleep(retry_seconds if self._was_away else interval_seconds)

    async def sweep(self) -> None:
        """Do all that is due now."""
        await self._end_leases()
        await self._sweep_conversations()
        while await self._heard(self._store.forget_releases(self._batch_rows)):
            pass
        await self._heard(self._store.forget_workers(self._batch_rows))

    async def _end_leases(self) -> None:
        while self._was_away:
            self._was_away = False
            leases = await self._heard(self._store.extend_leases())
            _log.warning("leases_extended", leases=leases)
        ended = await self._heard(self._store.end_leases(self._batch_rows))
        if ended:
            _log.warning("leases_ended", workers=ended)
            self._metrics.leases_ended(len(ended))
            self._changed.ring()
            self._released.ring()

    async def _sweep_conversations(self) -> None:
        expired = spent = forgotten = 0
        more = True
        while more:
            swept = await self._heard(self._store.sweep(self._batch_rows))
            self._metrics.swept(swept)
            if swept.expired:
                self._released.ring()
            expired += swept.expired
            spent += swept.spent
            forgotten += swept.forgotten
            more = swept.more
        if expired or spent or forgotten:
            _log.info("swept", expired=expired, spent=spent, forgotten=forgotten)

    async def _heard(self, call: Awaitable[T]) -> T:
        """Await the store, and note if it was away or did not answer for long."""
        began_us = self._clock.now_us()
        try:
            answer = await call
        except UnavailableError:
            self._was_away = True
            raise
        self._was_away |= self._clock.now_us() - began_us > _HUNG_US
        return answer


async def keep_clock(clock: LedgerClock, marks: Marks, interval_seconds: float) -> None:
    """Store the ledger's time for ever, and keep up with other replicas."""
    while True:
        try:
            clock.advance_to(await marks.save(clock))
        except UnavailableError:
            _log.warning("clock_mark_postponed")
        await asyncio.sleep(interval_seconds)
