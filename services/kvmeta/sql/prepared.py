"""Statements of every turn, as text that is made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite


class Prepared:
    """A statement that SQLite's driver gets without SQLAlchemy.

    What SQLAlchemy does around each execution takes as long as the statement, above all in
    a ledger that was idle: see docs/adr/0003-sqlite-writes.md. On PostgreSQL, where the way
    to the server takes longer than either, it is executed as usual.

    Args:
        statement: all its values are texts, integers, bytes or None, and none is a list. What
            it returns comes as the driver gives it: a truth value as 0 or 1.
    """

    statement: sa.Update | sa.Select[Any]
    """As SQLAlchemy executes it."""

    def __init__(self, statement: sa.Update | sa.Select[Any]) -> None:
        self.statement = statement
        compiled = statement.compile(dialect=sqlite.dialect(paramstyle="named"))
        self._text = str(compiled)
        self._constants = {
            name: value for name, value in compiled.params.items() if value is not None
        }

    def one_or_none(
        self, connection: sa.Connection, parameters: Mapping[str, object]
    ) -> Sequence[Any] | None:
        """Run it; the row that it returns, if there is one. There must not be two."""
        if connection.dialect.name != "sqlite":
            return connection.execute(self.statement, parameters).one_or_none()
        driver = connection.connection.driver_connection
        assert driver is not None
        rows = driver.execute(self._text, {**self._constants, **parameters}).fetchall()
        (row,) = rows or (None,)
        return row
