"""A whole kvloop with simulated engines, for tests that look at what decode retains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloop import AsyncClient, Completion, rpc
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.kvmeta import app as kvmeta_app
from services.kvmeta.settings import KvmetaSettings
from services.router import app as router_app
from services.router.settings import RouterSettings
from services.worker import app as worker_app
from services.worker.settings import WorkerSettings
from tests.flow.patience import PATIENT_ROUTER, PATIENT_WORKER
from tests.flow.sim.engines import MODEL, EngineClient, engine, poll, prompt
from tests.free_ports import held_port

ANSWER = 40
_LOOK_SECONDS = 0.05
SOON = 2.0
"""Seconds within which blocks that nobody wants are free."""


def key(conversation: str) -> common_pb2.ConversationKey:
    """A conversation for the ledger."""
    return common_pb2.ConversationKey(tenant="default", model=MODEL, conversation_id=conversation)


async def generate(
    client: AsyncClient, tokens: Sequence[int], conversation: str, **extra: Any
) -> Completion:
    """One turn, streamed."""
    return await client.generate(
        list(tokens),
        model=MODEL,
        conversation_id=conversation,
        max_tokens=ANSWER,
        extra_body={"return_token_ids": True, "ignore_eos": True, **extra},
    ).collect()


@dataclass
class World:
    """What tests talk to and look at."""

    client: AsyncClient
    ledger: ledger_pb2_grpc.LedgerServiceAsyncStub
    kvmeta: AsyncExitStack
    """Closing it ends kvmeta."""
    worker: worker_app.Worker
    """Decode's sidecar."""
    prefill: EngineClient
    decode: EngineClient
    referee: EngineClient

    async def turn(self, tokens: Sequence[int], conversation: str, **extra: Any) -> Completion:
        """One turn, whose answer must be what an engine says that computes everything."""
        done = await generate(self.client, tokens, conversation, **extra)
        assert list(done.token_ids) == await self.right(tokens)
        return done

    async def right(self, tokens: Sequence[int]) -> list[int]:
        """What an engine answers that computes everything itself."""
        reply = await self.referee.complete(list(tokens), max_tokens=ANSWER)
        answer: list[int] = reply.choice["token_ids"]
        return answer

    async def first_turn(self, conversation: str, length: int = 500, seed: int = 0) -> list[int]:
        """A first turn that is retained; returns prompt and answer."""
        tokens = prompt(length, seed)
        done = await self.turn(tokens, conversation)
        assert done.receipt.retain_outcome == "RETAINED"
        return [*tokens, *done.token_ids]

    async def take(self, conversation: str) -> ledger_pb2.Handle:
        """Take a conversation's handle, past the router."""
        taken = await self.ledger.TakeHandle(
            ledger_pb2.TakeHandleRequest(key=key(conversation), request_id=f"{conversation}-take")
        )
        assert taken.WhichOneof("outcome") == "handle"
        return taken.handle

    async def freed(self, seconds: float = SOON) -> None:
        """Wait until decode retains nothing and has every block back; fail if not soon."""

        async def nothing_is_held() -> bool:
            state = await self.decode.state()
            held = state["pins"] or state["blocks"]["used"] or self.sample("retained_pins")
            return not held

        await eventually(nothing_is_held, seconds)

    def sample(self, name: str, **labels: str) -> float | None:
        """A metric of decode's sidecar."""
        return self.worker.metrics.registry.get_sample_value(f"kvloop_worker_{name}", labels)


@asynccontextmanager
async def world(
    tmp_path: Path,
    *,
    sim: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    sidecar: Mapping[str, Any] | None = None,
) -> AsyncIterator[World]:
    """One prefill and one decode worker.

    Args:
        tmp_path: for the event sockets.
        sim: settings of all engines.
        decode: further settings of the decode engine.
        sidecar: settings of decode's sidecar.
    """
    async with AsyncExitStack() as stack:
        kvmeta_life = await stack.enter_async_context(AsyncExitStack())
        kvmeta = await kvmeta_life.enter_async_context(
            kvmeta_app.build(
                KvmetaSettings(
                    listen=f"127.0.0.1:{held_port()}",  # tests take it away
                    database_url="memory:",
                    sweep_interval_seconds=0.1,
                )
            )
        )
        address = f"127.0.0.1:{kvmeta.port}"
        referee = await stack.enter_async_context(engine(role="both", **(sim or {})))
        engines, workers = [], []
        for role, more, own in (
            ("prefill", {}, {}),
            ("decode", decode or {}, sidecar or {}),
        ):
            socket = tmp_path / f"{role}.sock"
            client = await stack.enter_async_context(
                engine(role=role, events_socket=str(socket), **{**(sim or {}), **more})
            )
            engines.append(client)
            values: dict[str, Any] = {
                "role": role,
                "worker_id": f"{role}-0",
                "listen": "127.0.0.1:0",
                "kvmeta": address,
                "engine_url": client.url,
                "events_socket": socket,
                "engine_poll_seconds": 0.2,
                "grace_seconds": 0.1,
                **PATIENT_WORKER,
                **own,
            }
            built = await stack.enter_async_context(worker_app.build(WorkerSettings(**values)))
            workers.append(built)
        router = await stack.enter_async_context(
            router_app.build(
                RouterSettings(
                    listen="127.0.0.1:0",
                    gateway_listen="127.0.0.1:0",
                    kvmeta=address,
                    shutdown_grace_seconds=0.0,
                    **PATIENT_ROUTER,
                )
            )
        )
        await poll(lambda: [m for m in router.pool.models() if m.prefill and m.decode])
        channel = await stack.enter_async_context(rpc.open_channel(address))
        caller = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{router.port}"))
        ledger: ledger_pb2_grpc.LedgerServiceAsyncStub = ledger_pb2_grpc.LedgerServiceStub(channel)
        yield World(caller, ledger, kvmeta_life, workers[1], engines[0], engines[1], referee)


async def eventually(holds: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait for something that no one announces; fail after that many seconds.

    Seconds are counted in looks. Services, engines and test share one event loop, so on
    a busy machine looks come as much later as whatever is waited for.
    """
    for _ in range(round(seconds / _LOOK_SECONDS)):
        if await _true(holds):
            return
        await asyncio.sleep(_LOOK_SECONDS)
    assert await _true(holds), f"not in {seconds:.0f} s"


async def _true(holds: Callable[[], Any]) -> bool:
    found = holds()
    return bool(await found if isinstance(found, Awaitable) else found)
