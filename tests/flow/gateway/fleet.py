"""A whole kvloop in one process: gateway, router, kvmeta, sidecars, simulated engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from services.kvmeta import app as kvmeta_app
from services.kvmeta.settings import KvmetaSettings
from services.router import app as router_app
from services.router.settings import RouterSettings
from services.worker import app as worker_app
from services.worker.settings import WorkerSettings
from tests.flow.patience import PATIENT_ROUTER, PATIENT_WORKER
from tests.flow.sim.engines import MODEL, EngineClient, engine, poll

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Long enough that a turn which pulls is told from one that does not.
PREAMBLE = "tell me about the river and the mountain " * 20


@dataclass
class HttpReply:
    """A reply of the gateway, byte for byte."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of every event of a stream, which must end in [DONE]."""
        *events, done, rest = self.raw.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b""), self.raw[-300:]
        assert all(event.startswith(b"data: ") for event in events)
        return [json.loads(event[6:]) for event in events]


@dataclass
class Fleet:
    """What tests talk to and look at."""

    router: router_app.Router
    prefill: EngineClient
    decode: EngineClient
    session: aiohttp.ClientSession
    host: str
    kvmeta: kvmeta_app.Kvmeta
    workers: list[worker_app.Worker]
    """The sidecars, prefill first."""

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return f"http://{self.host}:{self.router.gateway_port}"

    async def post(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> HttpReply:
        """POST JSON, or bytes as they are, and read the reply to its end."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, data=data, headers=sent) as reply:
            return HttpReply(reply.status, reply.headers, await reply.read())

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> HttpReply:
        """GET."""
        async with self.session.get(self.url + path, headers=headers) as reply:
            return HttpReply(reply.status, reply.headers, await reply.read())

    async def chat(
        self, messages: list[dict[str, Any]], headers: Mapping[str, str] | None = None, **more: Any
    ) -> HttpReply:
        """One chat turn."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 60, **more}
        return await self.post(CHAT, body, headers)

    async def settled(self) -> None:
        """Wait until both engines run nothing."""
        for client in (self.prefill, self.decode):
            await client.until(lambda state: state["running"] == [])

    def count(self, name: str, **labels: str) -> float:
        """Value of a counter of the router."""
        value = self.router.metrics.registry.get_sample_value(f"kvloop_router_{name}", labels)
        return value or 0.0


@asynccontextmanager
async def fleet(
    tmp_path: Path,
    *,
    sim: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    host: str = "127.0.0.1",
    kvmeta: Mapping[str, Any] | None = None,
    worker: Mapping[str, Any] | None = None,
    **router: Any,
) -> AsyncIterator[Fleet]:
    """One prefill and one decode worker, all ports free ones.

    Args:
        tmp_path: for the ledger and the event sockets.
        sim: settings of both engines.
        decode: further settings of the decode engine.
        host: where all of kvloop's servers listen; an IPv6 one in brackets.
        kvmeta: further settings of kvmeta.
        worker: further settings of both sidecars.
        router: settings of the router.
    """
    async with AsyncExitStack() as stack:
        values: dict[str, Any] = {
            "listen": f"{host}:0",
            "database_url": f"sqlite:///{tmp_path / 'ledger.db'}",
            **(kvmeta or {}),
        }
        ledger = await stack.enter_async_context(kvmeta_app.build(KvmetaSettings(**values)))
        address = f"{host}:{ledger.port}"
        engines, workers = [], []
        for role, more in (("prefill", {}), ("decode", decode or {})):
            socket = tmp_path / f"{role}.sock"
            client = await stack.enter_async_context(
                engine(role=role, events_socket=str(socket), **{**(sim or {}), **more})
            )
            engines.append(client)
            values = {
                "role": role,
                "worker_id": f"{role}-0",
                "listen": f"{host}:0",
                "kvmeta": address,
                "engine_url": client.url,
                "events_socket": socket,
                "engine_poll_seconds": 60,
                "grace_seconds": 0.1,
                # Simulated engines take no time, so there is nothing to compare.
                "pull_guard": False,
                **PATIENT_WORKER,
                **(worker or {}),
            }
            workers.append(
                await stack.enter_async_context(worker_app.build(WorkerSettings(**values)))
            )
        settings: dict[str, Any] = {
            "listen": f"{host}:0",
            "gateway_listen": f"{host}:0",
            "kvmeta": address,
            "shutdown_grace_seconds": 0.0,
            **PATIENT_ROUTER,
            **router,
        }
        built = await stack.enter_async_context(router_app.build(RouterSettings(**settings)))
        await poll(lambda: [m for m in built.pool.models() if m.prefill and m.decode])
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Fleet(built, engines[0], engines[1], session, host, ledger, workers)
