"""One engine of the process, over all of its lives."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

import structlog

from services.sim import tcp_peers
from services.sim.core import EngineCore
from services.sim.events import EventLink, hello
from services.sim.faults import Fault, FaultBook
from services.sim.generate import GenerateParts
from services.sim.http_api import EngineApi
from services.sim.http_server import HttpServer, bind
from services.sim.jobs import JobMaker
from services.sim.link import Link
from services.sim.peers import Peers
from services.sim.spec import EngineSpec, Identity, new_identity
from services.sim.tokenizer import Tokenizer
from services.worker.clock import Clock
from services.worker.tasks import BackgroundTasks, background_tasks

_log = structlog.get_logger(__name__)


class HostState(StrEnum):
    """Whether an engine serves."""

    STARTING = "starting"
    UP = "up"
    REFUSING = "refusing"
    """It runs, but takes no new connections."""
    DOWN = "down"


@dataclass(frozen=True)
class Environment:
    """What all engines of a process share."""

    clock: Clock
    wall_clock: Callable[[], float]
    peers: Peers
    tokenizer: Tokenizer


class EngineHost:
    """Runs lives of one engine, one after the other. Implements EngineControl.

    Args:
        spec: the engine. Ports 0 are replaced by free ones, which stay the same.
        environment: what it shares with others.
        events_socket: where its sidecar listens; None: it has none.
        faults: standing from the start.
        seed: decides about faults with a probability.
    """

    def __init__(
        self,
        spec: EngineSpec,
        environment: Environment,
        *,
        events_socket: str | None,
        faults: Sequence[Fault],
        seed: int,
    ) -> None:
        self.spec = spec
        self.state = HostState.STARTING
        self.identity: Identity | None = None
        self._environment = environment
        self._events_socket = events_socket
        # Faults outlive a restart: they belong to the test, not to the engine.
        self._faults = FaultBook(seed, faults)
        self.link = Link()  # nor does a network change with an engine
        self._server: HttpServer | None = None
        self._tasks: BackgroundTasks | None = None
        self._changed = asyncio.Condition()
        self._ended = asyncio.Event()
        self._wanted = asyncio.Event()
        self._restart_after: float | None = None

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            OSError: a port cannot be bound.
        """
        while True:
            self._ended.clear()
            self._wanted.clear()
            async with self._life():
                await self._set(HostState.UP)
                await self._ended.wait()
            await self._set(HostState.DOWN)
            _log.info("engine_down", index=self.spec.index, restart_after=self._restart_after)
            if self._restart_after is None:
                await self._wanted.wait()
            else:
                await self._environment.clock.sleep(self._restart_after)

    async def reached(self, *states: HostState) -> None:
        """Wait until the engine is in one of these states."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.state in states)

    def restart(self, after_seconds: float) -> None:
        """End this life at once; begin another one later."""
        self._end(after_seconds)

    def exit(self) -> None:
        """End this life; begin another one only when `start` is called."""
        self._end(None)

    def start(self) -> None:
        """Begin a new life after `exit`. An engine that is up is left alone."""
        self._wanted.set()

    def refuse(self, seconds: float) -> None:
        """Take no new connections for a while. Requests that are under way go on."""
        if self.state is HostState.UP and self._server is not None and self._tasks is not None:
            self._server.close_listener()
            self._server.close_idle()
            self._tasks.start(self._accept_again(self._server, seconds), name="accept-again")

    def set_link(self, link: Link) -> None:
        """Change how fast others' blocks are read."""
        self.link.bytes_per_second = link.bytes_per_second
        self.link.transfer_seconds = link.transfer_seconds

    def hang_up(self, client: tuple[str, int]) -> None:
        """Close the connection with a client."""
        if self._server is not None:
            self._server.hang_up(client)

    def _end(self, restart_after: float | None) -> None:
        if self.state is HostState.DOWN:
            return
        self.state = HostState.DOWN
        self._restart_after = restart_after
        self._ended.set()

    async def _accept_again(self, server: HttpServer, seconds: float) -> None:
        await self._set(HostState.REFUSING)
        await self._environment.clock.sleep(seconds)
        await server.open(bind(self.spec.host, self.spec.port))
        await self._set(HostState.UP)

    async def _set(self, state: HostState) -> None:
        async with self._changed:
            self.state = state
            self._changed.notify_all()

    @asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        """Serve while the block runs; at its end, die as a process does."""
        environment = self._environment
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(background_tasks())
            side_listener = stack.enter_context(
                bind(self.spec.side_channel_host, self.spec.side_channel_port)
            )
            listener = stack.enter_context(bind(self.spec.host, self.spec.port))
            self.spec = spec = replace(
                self.spec,
                port=listener.getsockname()[1],
                side_channel_port=side_listener.getsockname()[1],
            )
            self.identity = identity = new_identity(spec)
            core = self._core(spec, identity, tasks)
            await stack.enter_async_context(tcp_peers.serve(core.side_channel, side_listener))
            tasks.start(core.run(), name="engine-core")
            fingerprint = f"vllm-{spec.version_text}-{secrets.token_hex(4)}"
            parts = GenerateParts(
                core,
                JobMaker(core, environment.tokenizer, self._faults, fingerprint),
                self,
                environment.clock,
                environment.wall_clock,
            )
            app = EngineApi(parts, environment.tokenizer, self._faults).app()
            server = HttpServer(app)
            stack.push_async_callback(server.end)
            await server.open(listener)
            self._server, self._tasks = server, tasks
            _log.info(
                "engine_up",
                index=spec.index,
                port=spec.port,
                engine_id=identity.engine_id,
                epoch=identity.epoch,
            )
            try:
                yield
            finally:
                self._server = self._tasks = None

    def _core(self, spec: EngineSpec, identity: Identity, tasks: BackgroundTasks) -> EngineCore:
        link: EventLink | None = None

        def send_event(event: dict[str, object], late_seconds: float) -> None:
            if link is not None:
                link.send(event, late_seconds)

        core = EngineCore(
            spec,
            identity,
            peers=self._environment.peers,
            clock=self._environment.clock,
            tasks=tasks,
            send_event=send_event,
            link=self.link,
        )
        if self._events_socket is not None and not spec.stock:
            link = EventLink(
                self._events_socket,
                hello(spec, identity),
                core,
                self._environment.clock,
                tasks,
            )
            tasks.start(link.run(), name="event-link")
        return core
