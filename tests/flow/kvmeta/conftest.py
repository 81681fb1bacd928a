"""Databases that kvmeta processes of a test share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.contract.postgres_server import PostgresServer, private_server


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of the test's own, which it may stop.

    The test is skipped where none is installed and none is required.
    """
    with private_server() as server:
        if server is None and os.environ.get("KVLOOP_REQUIRE_POSTGRES") == "1":
            pytest.fail("KVLOOP_REQUIRE_POSTGRES=1, but PostgreSQL is not installed")
        if server is None:
            pytest.skip("PostgreSQL is not installed")
        yield server
