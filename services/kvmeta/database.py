"""Opens the store that the settings name, and starts the ledger's clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import structlog

from services.kvmeta.clock import (
    Clock,
    HostTime,
    LedgerClock,
    resume_by_wall,
    resume_on_same_host,
)
from services.kvmeta.deadlines import Policy
from services.kvmeta.memory_store import MemoryStore
from services.kvmeta.settings import KvmetaSettings
from services.kvmeta.sql import schema
from services.kvmeta.sql.marks import SqlMarks
from services.kvmeta.sql.postgres import open_postgres
from services.kvmeta.sql.releases import start_revisions
from services.kvmeta.sql.sqlite import open_sqlite
from services.kvmeta.sql.store import SqlStore
from services.kvmeta.sql.transactions import Transactions
from services.kvmeta.startup_failures import startup_failures
from services.kvmeta.store import Store
from services.kvmeta.sweeper import keep_clock

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store that is ready, and its clock."""

    store: Store
    clock: Clock
    voided_handles: int
    """Handles that could not be trusted any more."""
    keep_clock: Callable[[], Coroutine[Any, Any, None]] | None
    """Stores the ledger's time for ever, if it outlives this process."""


@asynccontextmanager
async def open_store(
    settings: KvmetaSettings,
    policy: Policy,
    host: HostTime,
    *,
    clock: Clock | None,
    store: Store | None,
) -> AsyncIterator[OpenStore]:
    """The store of `settings.database_url`, unless one is given.

    Raises:
        UnavailableError: the database cannot be reached, or refuses kvmeta.
    """
    if store is not None or settings.database_url == "memory:":
        clock = clock or LedgerClock(host.reading().wall_us, host.uptime_us(), host.uptime_us)
        yield OpenStore(store or MemoryStore(clock, policy), clock, 0, None)
        return
    async with AsyncExitStack() as stack:
        url = sa.make_url(settings.database_url)
        shared = url.get_backend_name() == "postgresql"
        if shared:
            # A migration may take long, and the others wait for it.
            async with open_postgres(url, pool_size=1, answer_timeout_seconds=None) as patient:
                with startup_failures(url):
                    await patient.write(schema.upgrade)
        transactions: Transactions = await stack.enter_async_context(
            open_postgres(url, pool_size=settings.postgres_pool_size)
            if shared
            else open_sqlite(Path(url.database or ""))
        )
        with startup_failures(url):
            if not shared:
                await transactions.write(schema.upgrade)
            opened = (
                OpenStore(SqlStore(transactions, clock, policy), clock, 0, None)
                if clock is not None
                else await _resumed(settings, policy, host, transactions, server_wall=shared)
            )
        yield opened


async def _resumed(
    settings: KvmetaSettings,
    policy: Policy,
    host: HostTime,
    transactions: Transactions,
    *,
    server_wall: bool,
) -> OpenStore:
    """The store of a database whose clock goes on where it was left."""
    marks = SqlMarks(transactions, host, server_wall=server_wall)
    mark, reading = await marks.load()
    resumed = (resume_by_wall if server_wall else resume_on_same_host)(mark, reading)
    if mark is None:
        await transactions.write(partial(start_revisions, at_least=resumed.ledger_us))
    clock = LedgerClock(resumed.ledger_us, reading.uptime_us, host.uptime_us)
    store = SqlStore(transactions, clock, policy)
    voided = 0
    if not resumed.continuous:
        # What was given out last, or how long ago, is not known: see ADR 0002.
        voided = await store.void_all()
        _log.warning("outstanding_handles_voided", handles=voided)
    keep = partial(keep_clock, clock, marks, settings.clock_mark_seconds)
    return OpenStore(store, clock, voided, keep)
