"""A whole kvloop in one process, every part of which can be broken and mended.

Two prefill and two decode workers on simulated engines, kvmeta on SQLite, a router.
Between any two services is a link, so that a service can die without saying so: its
links are cut before it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvloop import AsyncClient, rpc
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.kvmeta import app as kvmeta_app
from services.kvmeta.settings import KvmetaSettings
from services.router import app as router_app
from services.router.settings import RouterSettings
from services.sim.host import HostState
from services.worker import app as worker_app
from services.worker.settings import WorkerSettings
from tests.flow.faults import probe
from tests.flow.faults.life import Service
from tests.flow.faults.link import Link
from tests.flow.patience import HELD_UP_SECONDS
from tests.flow.sim.engines import EngineClient, engine, poll, process
from tests.flow.sim.jump_clock import JumpClock

LEASE_SECONDS = 60.0
"""How long decode keeps blocks that nobody renews, and more than prefill does."""
REFUSAL_SECONDS = 25.0
"""How long an engine takes no connections, unless it is mended."""
_ROUTER_SLOWNESS = 0.01
"""The router's clock runs so slowly that no worker of a busy test machine looks busy,
and turns go where the cases expect them."""


@dataclass(frozen=True)
class Setup:
    """Settings in which worlds differ."""

    policy: str = "recompute"
    """What engines do with a request whose pull fails."""
    patience_seconds: float = 30.0
    """How long the router bears a worker's silence."""
    event_seconds: float = 30.0
    """How long sidecars wait for the engine's word that a turn has ended."""


IMPATIENT = Setup(patience_seconds=HELD_UP_SECONDS)
"""For workers that hang."""
UNHEARD = Setup(event_seconds=HELD_UP_SECONDS)
"""For engines that never say it."""


@dataclass
class Worker:
    """One worker: a sidecar and its engine."""

    worker_id: str
    engine: EngineClient
    sidecar: Service[worker_app.Worker]

    async def state(self) -> dict[str, Any]:
        """The engine's tables, without every block."""
        state: dict[str, Any] = (await self.engine.get("/sim/state")).json
        return state

    async def until(self, holds: Callable[[dict[str, Any]], object]) -> None:
        """Wait for a state of the engine."""
        while not holds(await self.state()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def sample(self, name: str, **labels: str) -> float:
        """A metric of the sidecar."""
        registry = self.sidecar.service.metrics.registry
        return registry.get_sample_value(f"kvloop_worker_{name}", labels) or 0.0


@dataclass
class World:
    """What the cases break, and what is looked at afterwards."""

    clock: JumpClock
    """Time of the engines and the sidecars."""
    kvmeta: Service[kvmeta_app.Kvmeta]
    kvmeta_links: Sequence[Link]
    router: Service[router_app.Router]
    workers: dict[str, Worker]
    referee: EngineClient
    """Computes everything itself: what it says is right."""
    _clients: AsyncExitStack
    clients: dict[int, AsyncClient] = field(default_factory=dict)

    @property
    def client(self) -> AsyncClient:
        """A client of the router that runs now."""
        port = self.router.service.port
        return self.clients[port]

    async def connect(self) -> None:
        """Give the router that runs now a client."""
        port = self.router.service.port
        client = AsyncClient(f"127.0.0.1:{port}")
        self.clients[port] = await self._clients.enter_async_context(client)

    def of_role(self, role: str) -> list[Worker]:
        """The workers of one role."""
        return [worker for name, worker in self.workers.items() if name.startswith(role)]

    async def mend(self) -> None:
        """Undo all that was broken, and wait until everyone has noticed."""
        for worker in self.workers.values():
            if worker.engine.host.state == HostState.REFUSING:
                await self.clock.advance(REFUSAL_SECONDS)
            await worker.engine.host.reached(HostState.UP)
            await worker.engine.delete("/sim/faults")
        lost = [link for link in self.kvmeta_links if not link.works]
        restarted = not self.kvmeta.runs
        if restarted:
            await self.kvmeta.start()
        for link in lost:
            if not link.works:
                await link.mend()
        for worker in self.workers.values():
            if not worker.sidecar.runs:
                await worker.sidecar.start()
        if not self.router.runs:
            await self.router.start()
            await self.connect()
        await poll(self._in_service)
        if lost or restarted:
            for worker in self.of_role("decode"):
                await probe.commits(worker.sidecar.service.port, self.kvmeta.service.port)

    def _in_service(self) -> bool:
        """Whether the router would send turns to every worker as it is now."""
        if not self.router.service.follower.connected:
            return False
        if any(task.get_name().startswith("commit-") for task in asyncio.all_tasks()):
            return False  # a sidecar still asks the ledger what became of a turn
        known = self.router.service.pool.all()
        for worker_id, worker in self.workers.items():
            found, identity = known.get(worker_id), worker.engine.host.identity
            if found is None or identity is None or not (found.takes_turns and found.reachable):
                return False
            if found.worker.engine.epoch != identity.epoch:
                return False
        return True

    async def pins(self) -> list[ledger_pb2.Pin]:
        """What the ledger knows to be retained."""
        async with rpc.open_channel(f"127.0.0.1:{self.kvmeta.service.port}") as channel:
            stub = ledger_pb2_grpc.LedgerServiceStub(channel)
            listed = await stub.ListPins(ledger_pb2.ListPinsRequest(page_size=1000))
        return list(listed.pins)


@asynccontextmanager
async def world(tmp_path: Path, setup: Setup) -> AsyncIterator[World]:
    """Everything, ready for turns.

    Args:
        tmp_path: for the ledger and the event sockets.
        setup: its settings.
    """
    clock = JumpClock()
    async with AsyncExitStack() as stack:
        links = [await stack.enter_async_context(Link()) for _ in range(5)]
        kvmeta = Service(partial(kvmeta_app.build, _kvmeta_settings(tmp_path)), ways_in=links)
        await kvmeta.start()
        stack.push_async_callback(kvmeta.end)
        referee = await stack.enter_async_context(engine(role="both"))
        workers: dict[str, Worker] = {}
        for role, ways_out in (("prefill", links[1:3]), ("decode", links[3:5])):
            engines = await stack.enter_async_context(
                process(
                    clock=clock,
                    role=role,
                    engines=2,
                    events_socket=str(tmp_path / f"{role}-{{index}}.sock"),
                    pin_lease_seconds=LEASE_SECONDS,
                    kv_recompute_threshold=16,
                    kv_load_failure_policy=setup.policy,
                )
            )
            for index, (client, out) in enumerate(zip(engines, ways_out, strict=True)):
                worker_id = f"{role}-{index}"
                front = await stack.enter_async_context(Link())
                settings = _worker_settings(
                    tmp_path, role, worker_id, client.url, front, out, setup
                )
                sidecar = Service(
                    partial(worker_app.build, settings, clock=clock),
                    ways_in=[front],
                    ways_out=[out],
                )
                await sidecar.start()
                stack.push_async_callback(sidecar.end)
                workers[worker_id] = Worker(worker_id, client, sidecar)
        router = Service(
            partial(
                router_app.build,
                _router_settings(links[0], setup),
                clock=_slow_clock,
                rng=lambda: 0.0,  # always the same one first
            )
        )
        await router.start()
        stack.push_async_callback(router.end)
        clients = await stack.enter_async_context(AsyncExitStack())
        built = World(clock, kvmeta, links, router, workers, referee, clients)
        await built.connect()
        await built.mend()
        yield built


def _slow_clock() -> float:
    return time.monotonic() * _ROUTER_SLOWNESS


def _kvmeta_settings(tmp_path: Path) -> KvmetaSettings:
    return KvmetaSettings(
        listen="127.0.0.1:0",
        database_url=f"sqlite:///{tmp_path / 'ledger.db'}",
        sweep_interval_seconds=0.1,
        shutdown_grace_seconds=0.5,
    )


def _worker_settings(
    tmp_path: Path,
    role: str,
    worker_id: str,
    engine_url: str,
    front: Link,
    kvmeta: Link,
    setup: Setup,
) -> WorkerSettings:
    values: dict[str, Any] = {
        "role": role,
        "worker_id": worker_id,
        "listen": "127.0.0.1:0",
        "advertise": front.address,
        "kvmeta": kvmeta.address,
        "engine_url": engine_url,
        "events_socket": tmp_path / f"{worker_id}.sock",
        "engine_poll_seconds": 3600,
        "engine_connect_timeout_seconds": 20,
        "event_timeout_seconds": setup.event_seconds,
        "commit_timeout_seconds": HELD_UP_SECONDS,
        "settle_timeout_seconds": 20,
        # Longer than kvmeta is away in any case, on a busy machine, too.
        "lease_ttl_seconds": 120,
        "grace_seconds": 10,
        # Simulated engines take no time, so there is nothing to compare.
        "pull_guard": False,
    }
    return WorkerSettings(**values)


def _router_settings(kvmeta: Link, setup: Setup) -> RouterSettings:
    return RouterSettings(
        listen="127.0.0.1:0",
        gateway_listen="",
        kvmeta=kvmeta.address,
        ledger_timeout_seconds=HELD_UP_SECONDS,
        ledger_call_timeout_seconds=8.0,
        connect_timeout_seconds=20.0,
        registry_retry_seconds=0.05,
        registry_retry_max_seconds=0.1,
        worker_cooldown_seconds=0.5 * _ROUTER_SLOWNESS,
        worker_cooldown_max_seconds=0.5 * _ROUTER_SLOWNESS,
        prefill_timeout_seconds=setup.patience_seconds,
        first_chunk_timeout_seconds=setup.patience_seconds,
        next_chunk_timeout_seconds=setup.patience_seconds,
        policy="least_loaded",
        shutdown_grace_seconds=10.0,
    )
