"""Router, sidecars and simulated engines in this process, over a kvmeta of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloop.aio import AsyncClient
from kvloop.receipts import Receipt
from services.router import app as router_app
from services.router.settings import RouterSettings
from services.worker import app as worker_app
from services.worker.settings import WorkerSettings
from tests.contract.kvmeta_process import run_kvmeta
from tests.flow.held_up import HeldUp, held_up
from tests.flow.patience import PATIENT_ROUTER
from tests.flow.sim.engines import MODEL, engine, poll

# Long enough that a turn which pulls is told from one that does not.
PREAMBLE = "tell me about the river and the mountain " * 20


@dataclass
class Turn:
    """What a client saw of one turn."""

    receipt: Receipt
    seconds: float
    """From the request to the end of the answer."""
    held_up_seconds: float
    """Of these, in which nothing ran here."""

    @property
    def reused(self) -> bool:
        """Retained KV was pulled, and the turn's own is retained."""
        return self.receipt.pulled_tokens > 0 and self.receipt.retain_outcome == "RETAINED"


@dataclass
class Talk:
    """One conversation of a client that knows nothing of ledgers."""

    client: AsyncClient
    held_up: HeldUp
    name: str
    history: list[dict[str, str]] = field(
        default_factory=lambda: [{"role": "user", "content": PREAMBLE}]
    )

    async def say(self) -> Turn:
        """One turn."""
        clock = asyncio.get_running_loop().time
        began, held_up_before = clock(), self.held_up.seconds
        done = await self.client.chat(
            self.history, model=MODEL, conversation_id=self.name, max_tokens=100
        ).collect()
        seconds = clock() - began
        self.history += [
            {"role": "assistant", "content": done.text},
            {"role": "user", "content": "go on"},
        ]
        return Turn(done.receipt, seconds, self.held_up.seconds - held_up_before)

    async def until_reuse(self) -> Turn:
        """Turn after turn until one pulls and is retained; bounded by the test's timeout."""
        while not (turn := await self.say()).reused:
            pass
        return turn


@dataclass
class Clients:
    """Of routers to the same workers."""

    usual: AsyncClient
    """Of one with the settings that people get."""
    patient: AsyncClient
    """Of one that waits for the ledger where the other goes on without it."""
    held_up: HeldUp

    def talk(self, name: str) -> Talk:
        """A conversation by way of the usual router."""
        return Talk(self.usual, self.held_up, name)

    def patient_talk(self, name: str) -> Talk:
        """One by way of the patient router."""
        return Talk(self.patient, self.held_up, name)


@asynccontextmanager
async def stack(tmp_path: Path, database_url: str) -> AsyncIterator[Clients]:
    """One prefill and one decode worker.

    Their settings and those of the usual router are what people get, but for the guard, and
    for the time in which a connection is made.
    """
    async with AsyncExitStack() as exits:
        counted = await exits.enter_async_context(held_up())
        kvmeta = await exits.enter_async_context(run_kvmeta(database_url))
        address = f"127.0.0.1:{kvmeta.port}"
        for role in ("prefill", "decode"):
            socket = tmp_path / f"{role}.sock"
            served = await exits.enter_async_context(engine(role=role, events_socket=str(socket)))
            values: dict[str, Any] = {
                "role": role,
                "worker_id": f"{role}-0",
                "listen": "127.0.0.1:0",
                "kvmeta": address,
                "engine_url": served.url,
                "events_socket": socket,
                "engine_poll_seconds": 60,
                "engine_connect_timeout_seconds": 20,
                "grace_seconds": 0.1,
                # Simulated engines take no time, so there is nothing to compare.
                "pull_guard": False,
            }
            await exits.enter_async_context(worker_app.build(WorkerSettings(**values)))
        usual, patient = [
            await exits.enter_async_context(_router(address, **more))
            for more in ({}, PATIENT_ROUTER)
        ]
        yield Clients(usual, patient, counted)


@asynccontextmanager
async def _router(kvmeta: str, **more: Any) -> AsyncIterator[AsyncClient]:
    """A client of a router that knows the workers."""
    settings = RouterSettings(
        **{
            "listen": "127.0.0.1:0",
            "gateway_listen": "",
            "kvmeta": kvmeta,
            "shutdown_grace_seconds": 0,
            "connect_timeout_seconds": 20,
            **more,
        }
    )
    async with router_app.build(settings) as router:
        await poll(lambda: [m for m in router.pool.models() if m.prefill and m.decode])
        async with AsyncClient(f"127.0.0.1:{router.port}") as client:
            yield client
