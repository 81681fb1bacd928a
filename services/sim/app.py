"""Builds a process of simulated engines: the only place that knows every part."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from services.common.addresses import split_host_port
from services.sim.admin import admin_app
from services.sim.host import EngineHost, Environment, HostState
from services.sim.http_server import HttpServer, bind
from services.sim.peers import Peers
from services.sim.settings import SimSettings
from services.sim.tcp_peers import TcpPeers
from services.sim.tokenizer import Tokenizer
from services.worker.clock import Clock, SystemClock
from services.worker.tasks import background_tasks


@dataclass(frozen=True)
class SimProcess:
    """Engines that serve."""

    hosts: Sequence[EngineHost]
    admin_port: int | None

    async def all_down(self) -> None:
        """Wait until every engine is down. With an admin port any can come back,
        without one the process has nothing left to do."""
        for host in self.hosts:
            await host.reached(HostState.DOWN)


@asynccontextmanager
async def build(
    settings: SimSettings,
    *,
    clock: Clock | None = None,
    wall_clock: Callable[[], float] = time.time,
    peers: Peers | None = None,
) -> AsyncIterator[SimProcess]:
    """Serve engines while the block runs.

    Args:
        settings: the process's settings.
        clock: time that passes.
        wall_clock: seconds since the epoch, for timestamps in replies.
        peers: how engines reach each other's blocks; over TCP if omitted.

    Raises:
        OSError: a port cannot be bound.
    """
    environment = Environment(clock or SystemClock(), wall_clock, peers or TcpPeers(), Tokenizer())
    hosts = [
        EngineHost(
            spec,
            environment,
            events_socket=settings.events_socket_of(spec.index),
            faults=settings.faults,
            seed=settings.seed + spec.index,
        )
        for spec in settings.specs()
    ]
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(background_tasks())
        for host in hosts:
            tasks.start(host.run(), name=f"engine-{host.spec.index}")
        for host in hosts:
            await host.reached(HostState.UP)
        admin_port = None
        if settings.admin_listen is not None:
            listener = stack.enter_context(bind(*split_host_port(settings.admin_listen)))
            admin_port = listener.getsockname()[1]
            server = HttpServer(admin_app(hosts))
            stack.push_async_callback(server.end)
            await server.open(listener)
        yield SimProcess(hosts, admin_port)
