"""Why kvmeta cannot start on its database, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy import exc

from kvloop.errors import UnavailableError

_MISSING_RIGHT = "42501"
_REFUSALS = {
    "28P01": "check the user and its password in --database-url",
    "28000": "its pg_hba.conf must let this user in from here; if that asks for TLS, "
    "--database-url needs ssl=require or ssl=verify-full",
    "3D000": "create that database, or correct its name in --database-url",
    _MISSING_RIGHT: "the user must be allowed to create and change tables there",
}
"""What to do about a server that answers and says no, by SQLSTATE."""
_UNREACHABLE = {
    "postgresql": "check host and port in --database-url, and that it runs and takes connections",
    "sqlite": "its folder must exist, and kvmeta must be allowed to write there",
}
"""What to do where nothing else is known, by kind of database."""


@contextmanager
def startup_failures(url: sa.URL) -> Iterator[None]:
    """Say what is wrong with the database, and what to do, if the block fails for it.

    Args:
        url: the database. Its password is not told.

    Raises:
        UnavailableError: DATABASE_REFUSED if it answers and says no, or else
            DATABASE_UNAVAILABLE.
    """
    try:
        yield
    except UnavailableError as error:
        raise _told(url, error.__cause__ or error) from error
    except exc.DBAPIError as error:
        if _sqlstate(error) != _MISSING_RIGHT:
            raise
        raise _told(url, error) from error


def _told(url: sa.URL, cause: BaseException) -> UnavailableError:
    where = url.difference_update_query(["password"]).render_as_string(hide_password=True)
    said = str(getattr(cause, "orig", None) or cause) or "no answer in time"
    refusal = _REFUSALS.get(_sqlstate(cause))
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


def _sqlstate(error: BaseException) -> str:
    return getattr(getattr(error, "orig", None), "sqlstate", None) or ""
