"""SQLite: one writer thread that commits what is waiting in one transaction.

See docs/adr/0003-sqlite-writes.md for the reasons.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import QueuePool

from services.kvmeta.sql.transactions import Work, database_errors

T = TypeVar("T")

_MAX_GROUP = 256
_READERS = 2
_BUSY_TIMEOUT_MS = 5_000
_PRAGMAS = (
    f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}",
    "PRAGMA journal_mode = WAL",
    # A committed change survives the death of the process. What the death of
    # the machine may undo is dealt with at start: see the ADR.
    "PRAGMA synchronous = NORMAL",
    "PRAGMA cache_size = -65536",
    "PRAGMA journal_size_limit = 67108864",
)


@dataclass(frozen=True, slots=True)
class _Job:
    work: Work[Any]
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Outcome:
    answer: asyncio.Future[Any]
    value: Any = None
    error: Exception | None = None


@asynccontextmanager
async def open_sqlite(path: Path) -> AsyncIterator[SqliteTransactions]:
    """Transactions on a database file, which is made if it is absent.

    Waiting writes are finished on exit.
    """
    writer = _engine(path, begin="BEGIN IMMEDIATE", connections=1)
    reader = _engine(path, begin="BEGIN", connections=_READERS)
    transactions = SqliteTransactions(writer, reader)
    try:
        transactions.start()
        yield transactions
    finally:
        await transactions.stop()
        reader.dispose()
        writer.dispose()


class SqliteTransactions:
    """Transactions on one SQLite file; made by `open_sqlite`."""

    def __init__(self, writer: sa.Engine, reader: sa.Engine) -> None:
        self._writer = writer
        self._reader = reader
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._write_all, name="kvmeta-sqlite-writer")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kvmeta-sqlite-reader")

    def start(self) -> None:
        """Start the writer thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Finish what is waiting and end the threads."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._readers.shutdown)

    async def write(self, work: Work[T]) -> T:
        """See Transactions.write. Cancelled before its turn, it is not run."""
        answer: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(work, answer))
        with database_errors():
            return await answer

    async def read(self, work: Work[T]) -> T:
        """See Transactions.read."""
        with database_errors():
            return await self._loop.run_in_executor(self._readers, self._read, work)

    def _read(self, work: Work[T]) -> T:
        with self._reader.connect() as connection:
            return work(connection)

    def _write_all(self) -> None:
        while jobs := self._next_group():
            outcomes = self._run_group(jobs)
            self._loop.call_soon_threadsafe(_deliver, outcomes)

    def _next_group(self) -> list[_Job]:
        """All that is waiting, at least one; empty once stop was asked for."""
        job = self._jobs.get()
        jobs: list[_Job] = []
        while job is not None:
            jobs.append(job)
            if len(jobs) == _MAX_GROUP or self._jobs.empty():
                return jobs
            job = self._jobs.get()
        if jobs:
            self._jobs.put(None)  # stop after this group
        return jobs

    def _run_group(self, jobs: list[_Job]) -> list[_Outcome]:
        wanted = [job for job in jobs if not job.answer.cancelled()]
        try:
            with self._writer.begin() as connection:
                return [_Outcome(job.answer, job.work(connection)) for job in wanted]
        except Exception as error:
            if len(wanted) == 1:
                return [_Outcome(wanted[0].answer, error=error)]
        # One of them failed and all were rolled back: each for itself, then.
        return [outcome for job in wanted for outcome in self._run_group([job])]


def _deliver(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        if outcome.answer.done():  # its caller has gone
            continue
        if outcome.error is not None:
            outcome.answer.set_exception(outcome.error)
        else:
            outcome.answer.set_result(outcome.value)


def _engine(path: Path, *, begin: str, connections: int) -> sa.Engine:
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)),
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        connect_args={"check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        for pragma in _PRAGMAS:
            connection.execute(pragma)

    @event.listens_for(engine, "begin")
    def _on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
