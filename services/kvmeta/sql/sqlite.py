"""SQLite: one writer thread that commits what is waiting in one transaction.

See docs/adr/0003-sqlite-writes.md for the reasons.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
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
    # The log grows to 64 MiB before its pages go to the file, so a page that many
    # turns change is written there once.
    "PRAGMA wal_autocheckpoint = 16384",
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
    writer = _engine(path, connections=1)
    reader = _engine(path, connections=_READERS)

    @event.listens_for(reader, "begin")
    def _on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    transactions = SqliteTransactions(writer, reader)
    try:
        yield transactions
    finally:
        await transactions.finish()
        reader.dispose()
        writer.dispose()


class SqliteTransactions:
    """Transactions on one SQLite file; made by `open_sqlite`.

    Writes that arrive while a group is being committed, or in the same round of
    the event loop, make up the next group.
    """

    def __init__(self, writer: sa.Engine, reader: sa.Engine) -> None:
        self._writer = _Writer(writer)
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        # Not an executor: what it does around each job takes as long as the job.
        self._groups: SimpleQueue[list[_Job] | None] = SimpleQueue()
        self._writer_thread = threading.Thread(target=self._write_groups, name="kvmeta-sqlite")
        self._writer_thread.start()
        self._reader_threads = ThreadPoolExecutor(_READERS, "kvmeta-sqlite-reader")
        self._waiting: list[_Job] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._finishing = False

    async def finish(self) -> None:
        """Commit what is waiting and end the threads. Nothing more is taken."""
        self._finishing = True
        try:
            await self._idle.wait()
        finally:
            self._groups.put(None)
        await asyncio.to_thread(self._writer_thread.join)
        await asyncio.to_thread(self._reader_threads.shutdown)

    async def write(self, work: Work[T]) -> T:
        """See Transactions.write. Cancelled before its group begins, it is not run."""
        if self._finishing:
            raise RuntimeError("the database is being closed")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append(_Job(work, answer))
        if self._idle.is_set():
            self._idle.clear()
            self._loop.call_soon(self._start_group)
        with database_errors():
            return await answer

    async def write_single(self, work: Work[T]) -> T:
        """See Transactions.write_single. The group has its begin and end anyway."""
        return await self.write(work)

    async def read(self, work: Work[T]) -> T:
        """See Transactions.read."""
        with database_errors():
            return await self._loop.run_in_executor(self._reader_threads, self._read, work)

    def _read(self, work: Work[T]) -> T:
        with self._reader.connect() as connection:
            return work(connection)

    def _start_group(self) -> None:
        jobs, self._waiting = self._waiting[:_MAX_GROUP], self._waiting[_MAX_GROUP:]
        self._groups.put(jobs)

    def _end_group(self, outcomes: list[_Outcome]) -> None:
        for outcome in outcomes:
            if outcome.answer.done():  # its caller has gone
                continue
            if outcome.error is not None:
                outcome.answer.set_exception(outcome.error)
            else:
                outcome.answer.set_result(outcome.value)
        if self._waiting:
            self._start_group()
        else:
            self._idle.set()

    def _write_groups(self) -> None:
        """What the writer thread does."""
        while (jobs := self._groups.get()) is not None:
            outcomes = self._run_group(jobs)
            self._loop.call_soon_threadsafe(self._end_group, outcomes)
        self._writer.close()

    def _run_group(self, jobs: list[_Job]) -> list[_Outcome]:
        wanted = [job for job in jobs if not job.answer.cancelled()]
        if not wanted:
            return []
        begun = False
        try:
            with self._writer.transaction() as connection:
                begun = True
                return [_Outcome(job.answer, job.work(connection)) for job in wanted]
        except Exception as error:
            # A database that is locked makes each attempt wait: one speaks for all.
            if not begun or len(wanted) == 1:
                return [_Outcome(job.answer, error=error) for job in wanted]
        # One of them failed and all were rolled back: each for itself, then.
        return [outcome for job in wanted for outcome in self._run_group([job])]


class _Writer:
    """The connection that writes, for one thread.

    It is kept from one transaction to the next, and told of begin and commit without
    SQLAlchemy: getting a connection out of the pool, and back, takes as long as two
    statements.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._connection: sa.Connection | None = None

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Run the block in a transaction; rolled back if it raises."""
        if self._connection is None:
            self._connection = self._engine.connect()
            self._connection.begin()  # as far as SQLAlchemy knows, all is one transaction
        driver = self._connection.connection.driver_connection
        assert driver is not None
        try:
            driver.execute("BEGIN IMMEDIATE")
            yield self._connection
            driver.execute("COMMIT")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the connection back to its pool, which rolls back what is not committed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _engine(path: Path, *, connections: int) -> sa.Engine:
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)),
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        connect_args={"check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        for pragma in _PRAGMAS:
            connection.execute(pragma)

    return engine
