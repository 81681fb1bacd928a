"""A PostgreSQL server that refuses kvmeta, or is not there, is named with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
import sqlalchemy as sa

from kvloop.errors import UnavailableError
from services.kvmeta import app
from services.kvmeta.settings import KvmetaSettings
from services.kvmeta.sql.postgres import open_postgres
from tests.contract.postgres_server import PostgresServer, private_server

TRUST = "local all all trust\n"
PASSWORD = "local all all scram-sha-256\n"
TLS_ONLY = "hostssl all all 0.0.0.0/0 trust\n"


@pytest.fixture(scope="module")
def picky(optional_postgres: PostgresServer | None) -> Iterator[PostgresServer]:
    """A server of this module's own, which can be told whom to let in."""
    if optional_postgres is None:
        pytest.skip("PostgreSQL is not installed")
    with private_server() as server:
        assert server is not None
        yield server


async def failure(url: sa.URL) -> UnavailableError:
    """What a kvmeta ends with that starts on this database."""
    settings = KvmetaSettings(
        listen="127.0.0.1:0", database_url=url.render_as_string(hide_password=False)
    )
    async with AsyncExitStack() as stack:
        with pytest.raises(UnavailableError) as caught:
            await stack.enter_async_context(app.build(settings))
    return caught.value


@pytest.mark.parametrize("password", [None, "hunter2"])
async def test_a_wrong_password_is_named_and_not_told(
    picky: PostgresServer, password: str | None
) -> None:
    picky.admit(PASSWORD)
    refused = await failure(sa.make_url(picky.url).set(password=password))

    assert refused.reason == "DATABASE_REFUSED"
    assert 'password authentication failed for user "kvloop"' in str(refused)
    assert "check the user and its password" in str(refused)
    assert "hunter2" not in str(refused)


async def test_a_password_in_the_query_is_not_told_either(picky: PostgresServer) -> None:
    picky.admit(PASSWORD)
    refused = await failure(
        sa.make_url(picky.url).update_query_dict({"password": "hunter2"}, append=True)
    )

    assert refused.reason == "DATABASE_REFUSED"
    assert "hunter2" not in str(refused)


async def test_a_server_that_demands_tls_says_how_to_use_it(picky: PostgresServer) -> None:
    picky.admit(TLS_ONLY)
    refused = await failure(sa.make_url(picky.url))

    assert refused.reason == "DATABASE_REFUSED"
    assert "no encryption" in str(refused)
    assert "ssl=verify-full" in str(refused)


async def test_an_unknown_database_is_named(picky: PostgresServer) -> None:
    picky.admit(TRUST)
    refused = await failure(sa.make_url(picky.url).set(database="nosuch"))

    assert refused.reason == "DATABASE_REFUSED"
    assert 'database "nosuch" does not exist' in str(refused)
    assert "create that database" in str(refused)


async def test_a_user_without_rights_is_told_which_it_needs(picky: PostgresServer) -> None:
    picky.admit(TRUST)
    url = sa.make_url(picky.url)
    async with open_postgres(url, pool_size=1) as owner:
        await owner.write(_add_guest)
    refused = await failure(url.set(username="guest"))

    assert refused.reason == "DATABASE_REFUSED"
    assert "permission denied" in str(refused)
    assert "allowed to create and change tables" in str(refused)


@pytest.mark.parametrize("host", ["127.0.0.1:1", "nosuch.invalid:5432"])
async def test_a_server_that_is_not_there_is_named(host: str) -> None:
    away = await failure(sa.make_url(f"postgresql://kvloop@{host}/postgres"))

    assert away.reason == "DATABASE_UNAVAILABLE"
    assert host in str(away)
    assert "check host and port" in str(away)


async def test_a_file_that_cannot_be_opened_is_named(tmp_path) -> None:
    away = await failure(sa.make_url(f"sqlite:///{tmp_path}/missing/ledger.db"))

    assert away.reason == "DATABASE_UNAVAILABLE"
    assert f"{tmp_path}/missing/ledger.db" in str(away)
    assert "its folder must exist" in str(away)


async def test_a_server_that_refuses_later_counts_as_away(picky: PostgresServer) -> None:
    picky.admit(TRUST)
    async with open_postgres(sa.make_url(picky.url), pool_size=1) as transactions:
        await transactions.read(_one)
        picky.admit(PASSWORD)
        with pytest.raises(UnavailableError):
            await transactions.write(_end_connection)
        with pytest.raises(UnavailableError):
            await transactions.read(_one)


def _add_guest(connection: sa.Connection) -> None:
    connection.execute(sa.text("CREATE ROLE guest LOGIN"))
    connection.execute(sa.text("REVOKE CREATE ON SCHEMA public FROM PUBLIC"))


def _one(connection: sa.Connection) -> object:
    return connection.execute(sa.text("SELECT 1")).scalar()


def _end_connection(connection: sa.Connection) -> None:
    connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))
