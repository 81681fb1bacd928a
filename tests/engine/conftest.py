"""One stack of real vLLM engines for all tests in this folder.

1 prefill and 1 decode worker, each real vLLM with NIXL and kvloop's connector,
one kvmeta on SQLite, one router. Starting it takes one to two minutes.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from kvloop import AsyncClient
from kvloop.stack import Stack, StackSettings, make_workers
from services.worker import tiny_model
from tests.engine.engines import EngineProbe

MODEL = "tiny"
ENGINE_ARGS = (
    "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 "
    # Reasoning only where a request asks for it.
    """--default-chat-template-kwargs '{"enable_thinking": false}'"""
)
TTL_SECONDS = 45
"""Long enough for a turn to follow another, short enough to wait for its end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here share one event loop, and may wait for an engine to start."""
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


@dataclass
class World:
    """The stack and everything a test needs to talk to it."""

    stack: Stack
    client: AsyncClient
    prefill: EngineProbe
    decode: EngineProbe
    random: random.Random

    def tokens(self, count: int) -> list[int]:
        """Random token ids of the small model's vocabulary, no special ones."""
        return [self.random.randrange(300, 4000) for _ in range(count)]

    def words(self, count: int) -> str:
        """Random words, one or more tokens each."""
        syllables = ["ka", "lo", "mi", "ren", "sol", "tur", "ve", "zan"]
        return " ".join(
            "".join(self.random.choices(syllables, k=self.random.randrange(1, 4)))
            for _ in range(count)
        )

    def conversation(self) -> str:
        """A conversation id that no test has used."""
        return f"conversation-{self.random.getrandbits(64):x}"


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: $MODEL, or the small model."""
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
    """The running stack."""
    settings = StackSettings(
        model=str(model_directory),
        served_model_name=MODEL,
        # What is pulled and how long it is kept shall not depend on how busy the machine
        # is, nor on how fast the tests before were.
        workers=tuple(
            replace(worker, args=("--no-pull-guard", "--lost-turns-share=0"))
            for worker in make_workers(
                decoder_kv_blocks_ttl_seconds=TTL_SECONDS,
                engine_args=ENGINE_ARGS,
            )
        ),
        run_dir=tmp_path_factory.mktemp("run"),
        # Gives tests /reset_prefix_cache.
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    async with (
        Stack(settings) as stack,
        AsyncClient(stack.router_address) as client,
        aiohttp.ClientSession() as session,
    ):
        yield World(
            stack=stack,
            client=client,
            prefill=EngineProbe(stack.engine_url("prefill-0"), session, MODEL),
            decode=EngineProbe(stack.engine_url("decode-0"), session, MODEL),
            random=random.Random(20261129),
        )
