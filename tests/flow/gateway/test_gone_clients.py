"""A client that goes away stops the engines' work within 0.2 s, at every step of its turn.

Real sidecars, simulated engines, kvmeta in memory; the router by either front. The
engines run in real time and would work for minutes more.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvloop import rpc
from kvloop.router.v1 import router_pb2, router_pb2_grpc
from services.kvmeta import app as kvmeta_app
from services.kvmeta.settings import KvmetaSettings
from services.router import app as router_app
from services.router.settings import RouterSettings
from services.worker import app as worker_app
from services.worker.settings import WorkerSettings
from tests.flow.patience import PATIENT_ROUTER, PATIENT_WORKER
from tests.flow.sim.engines import EngineClient, engine, poll

_LIMIT_SECONDS = 0.2
_TRIES = 10
"""The best counts: others may keep this machine busy at the moment of one."""
_PATIENCE_SECONDS = 30.0
_PROMPT = "time first token block cache " * 40
_TOKENS = 100_000

Leave = Callable[[], Awaitable[None]]


@dataclass
class Fleet:
    """What serves, and the engines behind it."""

    router: router_app.Router
    engines: dict[str, EngineClient]

    async def work(self, role: str) -> int:
        """Requests that an engine has on its hands."""
        state = await self.engines[role].state()
        return sum(len(state[step]) for step in ("running", "loading", "waiting"))

    async def until_work(self, role: str, some: bool) -> None:
        """Wait until an engine has work, or none."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while bool(await self.work(role)) is not some:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def start(self, front: str) -> Leave:
        """Begin a turn; what the client does to leave."""
        return await (self._over_http() if front == "http" else self._over_grpc())

    async def _over_http(self) -> Leave:
        port = self.router.gateway_port
        body = json.dumps(
            {
                "model": "sim-model",
                "messages": [{"role": "user", "content": _PROMPT}],
                "stream": True,
                "max_tokens": _TOKENS,
                "ignore_eos": True,
            }
        ).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()

        async def leave() -> None:
            writer.close()

        return leave

    async def _over_grpc(self) -> Leave:
        channel = rpc.make_aio_channel(f"127.0.0.1:{self.router.port}")
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        call = stub.Chat(
            router_pb2.ChatRequest(
                model="sim-model",
                messages=[router_pb2.ChatMessage(role="user", content=_PROMPT)],
                sampling=router_pb2.SamplingParams(max_tokens=_TOKENS),
                extra_body_json=b'{"ignore_eos":true}',
            )
        )

        async def leave() -> None:
            call.cancel()
            await channel.close()

        return leave


@asynccontextmanager
async def fleet(folder: Path, **engines: dict[str, Any]) -> AsyncIterator[Fleet]:
    """One worker of each role behind a router.

    Args:
        folder: for sockets.
        engines: settings of the simulated engines, by role.
    """
    async with AsyncExitStack() as stack:
        kvmeta = await stack.enter_async_context(
            kvmeta_app.build(KvmetaSettings(listen="127.0.0.1:0", database_url="memory:"))
        )
        address = f"127.0.0.1:{kvmeta.port}"
        clients = {}
        for role in ("prefill", "decode"):
            events = folder / f"{role}.sock"
            clients[role] = await stack.enter_async_context(
                engine(
                    role=role,
                    events_socket=str(events),
                    max_model_len=200_000,
                    num_kv_blocks=20_000,
                    **engines.get(role, {}),
                )
            )
            values: dict[str, Any] = {
                "role": role,
                "worker_id": role,
                "listen": "127.0.0.1:0",
                "kvmeta": address,
                "engine_url": clients[role].url,
                "events_socket": events,
                "engine_poll_seconds": 60,
                "grace_seconds": 1,
                **PATIENT_WORKER,
            }
            await stack.enter_async_context(worker_app.build(WorkerSettings(**values)))
        settings = RouterSettings(
            listen="127.0.0.1:0",
            gateway_listen="127.0.0.1:0",
            kvmeta=address,
            shutdown_grace_seconds=0,
            **PATIENT_ROUTER,
        )
        router = await stack.enter_async_context(router_app.build(settings))
        await poll(lambda: any(model.prefill and model.decode for model in router.pool.models()))
        yield Fleet(router, clients)


async def _seconds_to_stop(running: Fleet, front: str, role: str) -> float:
    """From the moment at which the client leaves to the engine's last work for it."""
    leave = await running.start(front)
    await running.until_work(role, True)
    left_at = time.perf_counter()
    await leave()
    await running.until_work(role, False)
    return time.perf_counter() - left_at


async def _best(running: Fleet, front: str, role: str) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        best = min(best, await _seconds_to_stop(running, front, role))
        if best < _LIMIT_SECONDS:
            break
    return best


_SLOW_PREFILL = {"prefill_tokens_per_second": 1.0}
_SLOW_TRANSFER = {"fault": ["slow_transfer;seconds=300"]}
_SLOW_TOKENS = {"inter_token_seconds": 0.02}


@pytest.mark.parametrize("front", ["http", "grpc"])
async def test_it_stops_in_prefill_and_decode_never_hears_of_the_turn(
    tmp_path: Path, front: str
) -> None:
    async with fleet(tmp_path, prefill=_SLOW_PREFILL) as running:
        assert await _best(running, front, "prefill") < _LIMIT_SECONDS
        assert await running.engines["decode"].metric("vllm:prompt_tokens_total") == 0
        assert await running.work("decode") == 0


@pytest.mark.parametrize("front", ["http", "grpc"])
async def test_it_stops_while_decode_still_pulls_from_prefill(tmp_path: Path, front: str) -> None:
    async with fleet(tmp_path, decode=_SLOW_TRANSFER) as running:
        assert await _best(running, front, "decode") < _LIMIT_SECONDS
        assert await running.work("prefill") == 0


@pytest.mark.parametrize("front", ["http", "grpc"])
async def test_it_stops_mid_stream_and_nothing_is_retained(tmp_path: Path, front: str) -> None:
    async with fleet(tmp_path, decode=_SLOW_TOKENS) as running:
        assert await _best(running, front, "decode") < _LIMIT_SECONDS
        assert await running.work("prefill") == 0
        assert (await running.engines["decode"].state())["pins"] == []
