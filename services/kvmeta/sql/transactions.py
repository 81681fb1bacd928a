"""The port between what runs inside a transaction and how it is run."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy import exc

from kvloop.errors import UnavailableError

_log = structlog.get_logger(__name__)

T = TypeVar("T")

# SQLSTATE classes: connection, login refused, no such database, rolled back for
# another, no resources, not in a state to, operator intervention (shutdown, time limits).
_AWAY = frozenset({"08", "28", "3D", "40", "53", "55", "57"})

Work = Callable[[sa.Connection], T]
"""What runs inside a transaction. It may run again if the first run was rolled
back, so it changes nothing but the database."""


class Transactions(Protocol):
    """Runs work atomically."""

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction and commit it.

        The change is whole or absent, also if the caller is cancelled. The
        answer comes after the commit.

        Raises:
            UnavailableError: the database cannot be reached or did not answer
                in time; whether the change was made is then unknown.
        """
        ...

    async def write_single(self, work: Work[T]) -> T:
        """Run `work` whose every statement is a whole change by itself.

        The same as write, but a server need not be told of the transaction's
        begin and end, which cost as much as the statement.

        Raises:
            UnavailableError: as for write.
        """
        ...

    async def read(self, work: Work[T]) -> T:
        """Run `work` on one snapshot of the database.

        Raises:
            UnavailableError: as for write.
        """
        ...


@contextmanager
def database_errors() -> Iterator[None]:
    """Turn what a driver raises when its database is away into UnavailableError.

    What it raises for a defect of ours passes through.
    """
    try:
        yield
    except (exc.DBAPIError, exc.TimeoutError, sqlite3.Error, OSError) as error:
        if isinstance(error, exc.DBAPIError | sqlite3.Error) and not _is_away(error):
            raise
        cause = getattr(error, "orig", None) or error
        _log.warning("database_unavailable", error=type(cause).__name__, detail=str(cause))
        raise UnavailableError(
            "the ledger's database cannot be reached", reason="DATABASE_UNAVAILABLE"
        ) from error


def _is_away(error: exc.DBAPIError | sqlite3.Error) -> bool:
    if isinstance(error, sqlite3.Error):
        # Busy, full, not to be opened and so on; but not a wrong statement.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        return isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR
    if error.connection_invalidated or isinstance(error, exc.InterfaceError):
        return True
    if isinstance(error.orig, sqlite3.Error):
        return _is_away(error.orig)
    state = getattr(error.orig, "sqlstate", None) or ""
    return state[:2] in _AWAY
