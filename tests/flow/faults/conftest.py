"""Worlds for the cases of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.flow.faults.worlds import Worlds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worlds(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worlds]:
    """Worlds for the cases of a module."""
    opened = Worlds(tmp_path_factory.mktemp("faults"))
    yield opened
    await opened.aclose()
