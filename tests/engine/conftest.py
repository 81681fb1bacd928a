"""One stack of real vLLM engines for all tests in this folder.

Starting it takes one to two minutes.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.worker import tiny_model
from tests.engine.leased import LeasedDecode, leased_decode
from tests.engine.world import MODEL, World, open_world


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here share one event loop, and may wait for an engine to start."""
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: $KVLOOP_TEST_MODEL, or the small model."""
    configured = os.environ.get("KVLOOP_TEST_MODEL")
    if configured:
        return Path(configured)
    directory = tmp_path_factory.mktemp("models") / MODEL
    tiny_model.make(directory)
    return directory


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def world(
    model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """The running stack. Its engines have /reset_prefix_cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        async with open_world(model_directory, tmp_path_factory.mktemp("run")) as opened:
            yield opened


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def decode(world: World, model_directory: Path) -> AsyncIterator[LeasedDecode]:
    """A decode engine with short leases, from now on in the place of the stack's own."""
    async with leased_decode(world, model_directory) as leased:
        yield leased
