"""Where the ledger's clock is kept between two lives of the ledger."""

from __future__ import annotations

import sqlalchemy as sa

from services.kvmeta.clock import Clock, HostTime, Mark, Reading
from services.kvmeta.sql.tables import ledger_clock
from services.kvmeta.sql.transactions import Transactions

_ONLY = 1
_k = ledger_clock.c
_LOAD = sa.select(ledger_clock).where(_k.id == _ONLY)
_LOCK = _LOAD.with_for_update()
_SERVER_TIME = sa.select(
    sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()) * 1_000_000, sa.BigInteger)
)


class SqlMarks:
    """clock.Marks in the ledger's database.

    Args:
        transactions: how transactions run.
        host: the clocks of this machine.
        server_wall: take the wall clock from the database server, which all
            replicas share, instead of from this machine.
    """

    def __init__(self, transactions: Transactions, host: HostTime, *, server_wall: bool) -> None:
        self._transactions = transactions
        self._host = host
        self._server_wall = server_wall

    async def load(self) -> tuple[Mark | None, Reading]:
        """See Marks."""
        return await self._transactions.read(
            lambda connection: (_load(connection), self._reading(connection))
        )

    async def save(self, clock: Clock) -> int:
        """See Marks."""
        return await self._transactions.write(lambda connection: self._save(connection, clock))

    def _save(self, connection: sa.Connection, clock: Clock) -> int:
        stored = connection.execute(_LOCK).one_or_none()
        reading = self._reading(connection)
        ledger_us = clock.now_us()
        if stored is not None and stored.ledger_us > ledger_us:
            highest: int = stored.ledger_us
            return highest
        values = {
            "ledger_us": ledger_us,
            "wall_us": reading.wall_us,
            "boot_id": reading.boot_id,
            "uptime_us": reading.uptime_us,
        }
        if stored is None:
            connection.execute(sa.insert(ledger_clock), {"id": _ONLY, **values})
        else:
            connection.execute(sa.update(ledger_clock).where(_k.id == _ONLY), values)
        return ledger_us

    def _reading(self, connection: sa.Connection) -> Reading:
        here = self._host.reading()
        if not self._server_wall:
            return here
        wall_us: int = connection.execute(_SERVER_TIME).scalar_one()
        return Reading(wall_us, boot_id="", uptime_us=here.uptime_us)


def _load(connection: sa.Connection) -> Mark | None:
    row = connection.execute(_LOAD).one_or_none()
    if row is None:
        return None
    return Mark(row.ledger_us, Reading(row.wall_us, row.boot_id, row.uptime_us))
