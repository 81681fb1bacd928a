"""Why kvmeta cannot start on its database, in words that say what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy import exc

from kvloop.errors import UnavailableError

_REFUSALS = {
    "28P01": "check the user and its password in --database-url",
    "28000": "its pg_hba.conf must let this user in from here; if that asks for TLS, "
    "--database-url needs ssl=require or ssl=verify-full",
    "3D000": "create that database, or correct its name in --database-url",
    "42501": "the user must be allowed to create and change tables there",
    "SQLITE_NOTADB": "that file is of another kind: name another one in --database-url",
    "SQLITE_CORRUPT": "restore it from a backup, or move it away: kvmeta begins a new one",
}
"""What to do about a database that answers and says no, by SQLSTATE or SQLite's name."""
_UNREACHABLE = {
    "postgresql": "check host and port in --database-url, and that it runs and takes connections",
    "sqlite": "its folder must exist, and kvmeta must be allowed to write there",
}
"""What to do where nothing else is known, by kind of database."""


@contextmanager
def startup_failures(url: sa.URL) -> Iterator[None]:
    """Say what is wrong with the database, and what to do, if the block fails for it.

    Args:
        url: the database. Neither its password nor any option but an address is told.

    Raises:
        UnavailableError: DATABASE_REFUSED if it answers and says no, or else
            DATABASE_UNAVAILABLE.
    """
    try:
        yield
    except UnavailableError as error:
        raise _told(url, error.__cause__ or error) from error
    except (exc.DBAPIError, sqlite3.Error) as error:
        if _code(error) not in _REFUSALS:
            raise
        raise _told(url, error) from error


def _told(url: sa.URL, cause: BaseException) -> UnavailableError:
    address = {name: said for name, said in url.query.items() if name in ("host", "port")}
    where = url.set(query=address).render_as_string(hide_password=True)
    said = str(getattr(cause, "orig", None) or cause) or "no answer in time"
    refusal = _REFUSALS.get(_code(cause))
    if refusal is not None:
        return UnavailableError(
            f"the ledger's database {where} refuses kvmeta: {said}; {refusal}",
            reason="DATABASE_REFUSED",
        )
    return UnavailableError(
        f"the ledger's database {where} cannot be reached: {said}; "
        + _UNREACHABLE[url.get_backend_name()],
        reason="DATABASE_UNAVAILABLE",
    )


def _code(error: BaseException) -> str:
    said = getattr(error, "orig", None) or error
    return getattr(said, "sqlstate", None) or getattr(said, "sqlite_errorname", None) or ""
