"""The stack of real engines, and everything a test needs to talk to it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvloop import AsyncClient
from kvloop.stack import Stack, StackSettings, make_workers
from kvloop.stack.ports import PortPool
from services.worker.launcher import launch
from services.worker.settings import WorkerSettings
from tests.engine.attached import engine_settings
from tests.engine.engines import EngineProbe, open_session

MODEL = "tiny"
TTL_SECONDS = 60
"""Long enough for a turn to follow another, short enough to wait for its end."""

_ENGINE_ARGS = (
    "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 "
    # Reasoning only where a request asks for it.
    """--default-chat-template-kwargs '{"enable_thinking": false}'"""
)
# What is pulled, what is kept and for how long shall not depend on how busy the
# machine is, nor on how fast the tests before were.
_SIDECAR_ARGS = (
    "--no-pull-guard",
    "--lost-turns-share=0",
    "--event-timeout-seconds=10",
    "--commit-timeout-seconds=10",
)
_ROUTER_ARGS = (
    # Both legs' bodies go to their engines ahead, short as they are.
    "--ahead-bytes=1",
    "--ledger-timeout-seconds=5",
    "--length-check-timeout-seconds=30",
    "--estimate-timeout-seconds=10",
)


@dataclass
class World:
    """The running stack.

    Attributes:
        stack: its processes.
        client: calls its router.
        prefill: the prefill engine itself. It runs beside the stack, which has its
            sidecar only, so that it outlives a sidecar that is killed.
        prefill_engine: how that engine was started.
        decode: the decode engine, which runs and falls with its sidecar.
        random: what prompts are made of.
    """

    stack: Stack
    client: AsyncClient
    prefill: EngineProbe
    prefill_engine: WorkerSettings
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


@asynccontextmanager
async def open_world(model: Path, run_dir: Path) -> AsyncIterator[World]:
    """1 prefill and 1 decode worker, each real vLLM with NIXL and kvloop's connector,
    one kvmeta on SQLite, one router.

    Args:
        model: a model folder.
        run_dir: for logs, sockets and the ledger.
    """
    async with AsyncExitStack() as resources:
        ports = resources.enter_context(PortPool())
        engine = engine_settings(
            "prefill",
            "prefill-0",
            model,
            run_dir,
            ports,
            served_model_name=MODEL,
            decoder_kv_blocks_ttl_seconds=TTL_SECONDS,
            engine_args=_ENGINE_ARGS,
        )
        await resources.enter_async_context(launch(engine))
        prefill, decode = make_workers(
            decoder_kv_blocks_ttl_seconds=TTL_SECONDS, engine_args=_ENGINE_ARGS
        )
        attach = (*_SIDECAR_ARGS, f"--engine-url={engine.engine_base_url}")
        settings = StackSettings(
            model=str(model),
            served_model_name=MODEL,
            workers=(replace(prefill, args=attach), replace(decode, args=_SIDECAR_ARGS)),
            router_args=_ROUTER_ARGS,
            run_dir=run_dir,
        )
        stack = await resources.enter_async_context(Stack(settings))
        client = await resources.enter_async_context(AsyncClient(stack.router_address))
        session = await resources.enter_async_context(open_session())
        yield World(
            stack=stack,
            client=client,
            prefill=EngineProbe(engine.engine_base_url, session, MODEL),
            prefill_engine=engine,
            decode=EngineProbe(stack.engine_url("decode-0"), session, MODEL),
            random=random.Random(20261129),
        )
