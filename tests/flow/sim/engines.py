"""Simulated engines over real sockets, and a client that speaks to them as anyone would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from services.sim import app
from services.sim.host import EngineHost, HostState
from services.sim.settings import SimSettings
from services.worker.clock import Clock
from tests.free_ports import held_ports

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "sim-model"
FIRST_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Reply:
    """An HTTP reply."""

    status: int
    json: Any

    @property
    def choice(self) -> dict[str, Any]:
        """The first choice."""
        choice: dict[str, Any] = self.json["choices"][0]
        return choice

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        error: dict[str, Any] = self.json["error"]
        return error


class EngineClient:
    """Speaks HTTP to one engine."""

    def __init__(
        self, session: aiohttp.ClientSession, host: EngineHost, process: app.SimProcess
    ) -> None:
        self._session = session
        self.host = host
        self.process = process

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.host.spec.port}"

    async def post(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """POST and read the whole reply."""
        async with self._session.post(self.url + path, json=body, headers=headers) as reply:
            return Reply(reply.status, await reply.json())

    async def get(self, path: str) -> Reply:
        """GET JSON."""
        async with self._session.get(self.url + path) as reply:
            return Reply(reply.status, await reply.json())

    async def delete(self, path: str) -> Reply:
        """DELETE."""
        async with self._session.delete(self.url + path) as reply:
            return Reply(reply.status, await reply.json())

    async def complete(self, prompt: Any, **members: Any) -> Reply:
        """A completion in one piece that does not end by itself."""
        body = {"model": MODEL, "prompt": prompt, "ignore_eos": True, "return_token_ids": True}
        return await self.post(COMPLETIONS, body | members)

    async def stream(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> list[Any]:
        """The data of all events; JSON is decoded."""
        return [event async for event in self.events(path, body, headers)]

    async def events(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Any]:
        """The data of events as they come. Leaving early closes the connection."""
        body = body | {"stream": True}
        async with self._session.post(self.url + path, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
            async for line in reply.content:
                if line.startswith(b"data: "):
                    data = line[6:].strip()
                    yield data.decode() if data == b"[DONE]" else json.loads(data)

    async def metric(self, name: str) -> float:
        """The sum of one metric over all labels."""
        async with self._session.get(self.url + "/metrics") as reply:
            text = await reply.text()
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        assert lines, f"no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def state(self) -> dict[str, Any]:
        """The engine's tables."""
        state: dict[str, Any] = (await self.get("/sim/state?blocks=1")).json
        return state

    async def next_life(self, before: dict[str, Any]) -> dict[str, Any]:
        """Wait until the engine has been restarted; its state then."""
        await poll(
            lambda: (
                self.host.state is HostState.UP
                and self.host.identity is not None
                and self.host.identity.epoch != before["epoch"]
            )
        )
        return await self.state()

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a state."""
        while not holds(state := await self.state()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return state


@asynccontextmanager
async def engine(*, clock: Clock | None = None, **settings: Any) -> AsyncIterator[EngineClient]:
    """One engine on free ports."""
    async with process(clock=clock, **settings) as clients:
        yield clients[0]


@asynccontextmanager
async def process(
    *, clock: Clock | None = None, **settings: Any
) -> AsyncIterator[list[EngineClient]]:
    """All engines of one process, on free ports."""
    count = settings.get("engines", 1)
    with held_ports(2 * count) as first:  # engines that are restarted bind them again
        ports = {"port": first, "side_channel_port": first + count}
        chosen = SimSettings(**ports | {"answer_tokens": 0} | settings)
        async with (
            app.build(chosen, clock=clock) as running,
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=60),
                # An engine may close an idle connection just when it is used again.
                connector=aiohttp.TCPConnector(force_close=True),
            ) as session,
        ):
            yield [EngineClient(session, host, running) for host in running.hosts]


async def poll(holds: Callable[[], object]) -> None:
    """Wait for something that no one announces. The test's timeout bounds it."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that differ with the seed."""
    return [1000 + (seed * 7919 + index * 31) % 1500 for index in range(length)]
