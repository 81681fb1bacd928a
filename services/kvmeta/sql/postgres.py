"""PostgreSQL: a pool of asyncpg connections, one transaction per call.

Any number of kvmeta processes may share one database. Row locks order them;
a transaction that loses against another is run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from kvloop.errors import UnsupportedError
from services.kvmeta.sql.transactions import Work, database_errors

T = TypeVar("T")

_ATTEMPTS = 5
_CONNECT_TIMEOUT_SECONDS = 2
_LOCK_TIMEOUT_MS = 2_000
_STATEMENT_TIMEOUT_MS = 10_000
_ANSWER_TIMEOUT_SECONDS = 12.0
"""Longer than the server lets a statement run: who is silent for so long is gone.
Without it a connection whose other end has vanished would wait for the operating
system to give up, for a quarter of an hour."""

# SQLSTATE: unique violation, serialization failure, deadlock, lock not available.
# A unique violation is two first commits at once: the second finds a row next time.
_LOST_A_RACE = frozenset({"23505", "40001", "40P01", "55P03"})


@asynccontextmanager
async def open_postgres(
    url: sa.URL,
    *,
    pool_size: int,
    answer_timeout_seconds: float | None = _ANSWER_TIMEOUT_SECONDS,
) -> AsyncIterator[PostgresTransactions]:
    """Transactions on a PostgreSQL database.

    Nothing is connected yet: a database that is away is found by the first call.

    Args:
        url: the database; the driver in it is ignored.
        pool_size: connections at most.
        answer_timeout_seconds: how long a statement may go without an answer
            before its connection is given up; None for any time.

    Raises:
        UnsupportedError: the driver is not installed.
    """
    engine = _engine(url, pool_size, answer_timeout_seconds)
    try:
        async with asyncio.TaskGroup() as tasks:
            yield PostgresTransactions(engine, tasks)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the block's own: its tasks never fail
    finally:
        await engine.dispose()


def _engine(url: sa.URL, pool_size: int, answer_timeout_seconds: float | None) -> AsyncEngine:
    try:
        return create_async_engine(
            url.set(drivername="postgresql+asyncpg"),
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=_CONNECT_TIMEOUT_SECONDS,
            connect_args={
                "timeout": _CONNECT_TIMEOUT_SECONDS,
                "command_timeout": answer_timeout_seconds,
                "server_settings": {
                    "application_name": "kvloop-kvmeta",
                    "lock_timeout": str(_LOCK_TIMEOUT_MS),
                    "statement_timeout": str(_STATEMENT_TIMEOUT_MS),
                },
            },
        )
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "PostgreSQL needs its driver: install kvloop[postgres]", reason="DRIVER_MISSING"
        ) from error


class PostgresTransactions:
    """Transactions on one PostgreSQL database; made by `open_postgres`."""

    def __init__(self, engine: AsyncEngine, tasks: asyncio.TaskGroup) -> None:
        self._engine = engine
        self._snapshots = engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
        self._singles = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._tasks = tasks

    async def write(self, work: Work[T]) -> T:
        """See Transactions.write. Once begun, it runs to its end."""

        async def attempt() -> T:
            async with self._engine.begin() as connection:
                return await connection.run_sync(work)

        return await self._to_the_end(attempt)

    async def write_single(self, work: Work[T]) -> T:
        """See Transactions.write_single. Once begun, it runs to its end."""

        async def attempt() -> T:
            async with self._singles.connect() as connection:
                return await connection.run_sync(work)

        return await self._to_the_end(attempt)

    async def read(self, work: Work[T]) -> T:
        """See Transactions.read."""
        with database_errors():
            async with self._snapshots.connect() as connection:
                return await connection.run_sync(work)

    async def _to_the_end(self, attempt: Callable[[], Awaitable[T]]) -> T:
        settled = self._tasks.create_task(_settle(attempt), name="transaction")
        outcome = await asyncio.shield(settled)
        if isinstance(outcome, _Failed):
            raise outcome.error
        return outcome


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


async def _settle(attempt: Callable[[], Awaitable[T]]) -> T | _Failed:
    """The outcome as a value: a failed transaction must not end its task group."""
    try:
        return await _until_won(attempt)
    except Exception as error:
        return _Failed(error)


async def _until_won(attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeat what was rolled back because another transaction came first."""
    with database_errors():
        for _ in range(_ATTEMPTS - 1):
            try:
                return await attempt()
            except exc.DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) not in _LOST_A_RACE:
                    raise
        return await attempt()
