"""Every store implementation, by one fixture."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import sqlalchemy as sa

from services.kvmeta.sql import postgres as sql_postgres
from services.kvmeta.sql.postgres import open_postgres
from services.kvmeta.sql.sqlite import open_sqlite
from services.kvmeta.sql.transactions import Transactions
from services.kvmeta.store import Store
from tests.contract import kvmeta_stores
from tests.contract.kvmeta_stores import POLICY, ManualClock
from tests.contract.postgres_server import PostgresServer, private_server
from tests.time_limits import limit

KINDS = ("memory", "sqlite", "postgres")
_PATIENCE_SECONDS = 180


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of each process makes a PostgreSQL server, which takes a while."""
    limit(items, Path(__file__).parent, _PATIENCE_SECONDS)


@pytest.fixture(scope="session")
def optional_postgres() -> Iterator[PostgresServer | None]:
    """A PostgreSQL server, or None where none is installed and none is required."""
    with private_server() as server:
        if server is None and os.environ.get("KVLOOP_REQUIRE_POSTGRES") == "1":
            pytest.fail("KVLOOP_REQUIRE_POSTGRES=1, but PostgreSQL is not installed")
        yield server


@pytest.fixture
def postgres(optional_postgres: PostgresServer | None) -> PostgresServer:
    """A PostgreSQL server; the test is skipped where none is installed."""
    if optional_postgres is None:
        pytest.skip("PostgreSQL is not installed")
    return optional_postgres


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no database that is away."""
    monkeypatch.setattr(sql_postgres, "_CONNECT_TIMEOUT_SECONDS", 60)


@pytest.fixture
def clock() -> ManualClock:
    """The ledger's clock."""
    return ManualClock()


@pytest.fixture(params=KINDS)
async def store(
    request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path
) -> AsyncIterator[Store]:
    """An empty store of each kind."""
    if request.param == "memory":
        opened = kvmeta_stores.open_memory(clock, POLICY)
    elif request.param == "sqlite":
        opened = kvmeta_stores.open_sqlite_store(tmp_path / "ledger.db", clock, POLICY)
    else:
        server = request.getfixturevalue("postgres")
        opened = kvmeta_stores.open_postgres_store(server.url, clock, POLICY)
    async with opened as made:
        yield made


@pytest.fixture(params=["sqlite", "postgres"])
async def bare_database(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Transactions]:
    """Transactions on a database without tables, of each kind."""
    if request.param == "sqlite":
        opened: AbstractAsyncContextManager[Transactions] = open_sqlite(tmp_path / "ledger.db")
    else:
        server = request.getfixturevalue("postgres")
        opened = open_postgres(sa.make_url(server.url), pool_size=2)
    async with opened as made:
        await made.write(_drop_everything)
        yield made


def _drop_everything(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":  # functions as well as tables
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))
        return
    found = sa.MetaData()
    found.reflect(connection)
    found.drop_all(connection)
