"""A database server that vanishes without closing its connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import sqlalchemy as sa

from kvloop.errors import UnavailableError
from services.kvmeta.sql.postgres import open_postgres
from tests.contract.vanishing_link import VanishingLink
from tests.flow.patience import HELD_UP_SECONDS

ONE = sa.text("SELECT 1")


async def test_connections_whose_server_vanished_are_replaced(postgres) -> None:
    directory = sa.make_url(postgres.url).query["host"]
    async with VanishingLink(Path(str(directory)) / ".s.PGSQL.5432") as link:
        url = sa.make_url(f"postgresql://kvloop@127.0.0.1:{link.port}/postgres")
        async with open_postgres(
            url, pool_size=2, answer_timeout_seconds=HELD_UP_SECONDS
        ) as transactions:

            def ask(connection: sa.Connection) -> int:
                one: int = connection.execute(ONE).scalar_one()
                return one

            calls = (transactions.write, transactions.write_single)
            assert await asyncio.gather(*(call(ask) for call in calls)) == [1, 1]
            link.vanish()
            outcomes = await asyncio.gather(*(call(ask) for call in calls), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 2
            for call in (*calls, transactions.read):
                assert await call(ask) == 1
