"""Long tasks: what the passing of time does to the store."""

from __future__ import annotations

import asyncio

import structlog

from kvloop.errors import UnavailableError
from services.kvmeta.bell import Bell
from services.kvmeta.clock import LedgerClock, Marks
from services.kvmeta.metrics import KvmetaMetrics
from services.kvmeta.store import Store

_log = structlog.get_logger(__name__)


class Sweeper:
    """Expires handles, ends leases and forgets old rows, in bounded batches.

    Nothing depends on it for correctness: a take checks the deadline and the
    lease itself.

    Args:
        store: what is swept.
        batch_rows: rows that one transaction changes.
        changed: rung when a lease ended.
        released: rung when releases were written.
        metrics: counts what was done.
    """

    def __init__(
        self,
        store: Store,
        *,
        batch_rows: int,
        changed: Bell,
        released: Bell,
        metrics: KvmetaMetrics,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._batch_rows = batch_rows
        self._changed = changed
        self._released = released

    async def run(self, interval_seconds: float) -> None:
        """Sweep for ever. A database that is away is asked again next time."""
        while True:
            try:
                await self.sweep()
            except UnavailableError:
                _log.warning("sweep_postponed")
            await asyncio.sleep(interval_seconds)

    async def sweep(self) -> None:
        """Do all that is due now."""
        ended = await self._store.end_leases(self._batch_rows)
        if ended:
            _log.warning("leases_ended", workers=ended)
            self._metrics.leases_ended(len(ended))
            self._changed.ring()
            self._released.ring()
        await self._sweep_conversations()
        while await self._store.forget_releases(self._batch_rows):
            pass
        await self._store.forget_workers(self._batch_rows)

    async def _sweep_conversations(self) -> None:
        expired = spent = forgotten = 0
        more = True
        while more:
            swept = await self._store.sweep(self._batch_rows)
            self._metrics.swept(swept)
            if swept.expired:
                self._released.ring()
            expired += swept.expired
            spent += swept.spent
            forgotten += swept.forgotten
            more = swept.more
        if expired or spent or forgotten:
            _log.info("swept", expired=expired, spent=spent, forgotten=forgotten)


async def keep_clock(clock: LedgerClock, marks: Marks, interval_seconds: float) -> None:
    """Store the ledger's time for ever, and keep up with other replicas."""
    while True:
        try:
            clock.advance_to(await marks.save(clock))
        except UnavailableError:
            _log.warning("clock_mark_postponed")
        await asyncio.sleep(interval_seconds)
