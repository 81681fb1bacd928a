"""The whole of kvloop as processes: ledger, simulated engines, sidecars, routers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bench.soak.processes import Service, supervised
from kvloop.stack.ports import PortPool

MODEL = "sim-model"
BLOCK_SIZE = 16
ROLES = ("prefill", "decode")
_PREFERRED_PORTS = range(20_000, 32_000, 10)
"""Below those that the kernel gives to connections: while a killed process is away,
nobody else must take its port. Between any two is room for other stacks' ports."""


@dataclass(frozen=True)
class Shape:
    """What there is, and how fast it is.

    Attributes:
        workers: of each role.
        routers: how many.
        inter_token_seconds: step of the decode engines.
        ttl_seconds: how long decode keeps a finished turn.
        pin_lease_seconds: how long it does so if nobody renews.
        kv_lease_seconds: how long prefill keeps what decode has not read.
        max_running_seqs: requests that run at once on one engine.
        prefill_blocks: KV blocks of a prefill engine: too few for all conversations,
            so that most of what is reused has to be pulled.
    """

    workers: int = 2
    routers: int = 1
    inter_token_seconds: float = 0.05
    ttl_seconds: float = 60.0
    pin_lease_seconds: float = 12.0
    kv_lease_seconds: float = 10.0
    max_running_seqs: int = 2048
    prefill_blocks: int = 4000

    @property
    def settled_after_seconds(self) -> float:
        """After this much rest, nothing may be retained any more."""
        return max(self.ttl_seconds, self.kv_lease_seconds) + self.pin_lease_seconds


@dataclass(frozen=True)
class Sidecar:
    """A worker's sidecar, and its engine."""

    worker_id: str
    role: str
    service: Service
    metrics_port: int
    engine_port: int


@dataclass(frozen=True)
class Router:
    """A router."""

    service: Service
    gateway_port: int
    metrics_port: int


@dataclass(frozen=True)
class Stack:
    """Everything that runs."""

    kvmeta: Service
    kvmeta_metrics_port: int
    engines: tuple[Service, ...]
    sidecars: tuple[Sidecar, ...]
    routers: tuple[Router, ...]

    @property
    def services(self) -> list[Service]:
        """All processes."""
        return [
            self.kvmeta,
            *self.engines,
            *(sidecar.service for sidecar in self.sidecars),
            *(router.service for router in self.routers),
        ]

    def seen_by_clients(self) -> list[Service]:
        """Those whose end can cost a turn. All others are to be done without."""
        decode = [sidecar.service for sidecar in self.sidecars if sidecar.role == "decode"]
        return [*decode, *(router.service for router in self.routers)]

    def victims(self) -> list[Service]:
        """Those that may be killed at any time: all of kvloop's own."""
        return [each for each in self.services if each not in self.engines]


def lay_out(shape: Shape, logs: Path, folder: Path, pool: PortPool) -> Stack:
    """Processes that are not started yet.

    Args:
        shape: what there is.
        logs: folder for logs.
        folder: for sockets and the ledger's database.
        pool: holds their ports until it is closed.
    """
    ports = map(pool.take, _PREFERRED_PORTS)

    def service(name: str, module: str, port: int, *args: str) -> Service:
        return Service(name, f"services.{module}", args, port, logs / f"{name}.log")

    kvmeta_port, kvmeta_metrics = next(ports), next(ports)
    kvmeta = service(
        "kvmeta",
        "kvmeta",
        kvmeta_port,
        f"--listen=127.0.0.1:{kvmeta_port}",
        f"--metrics-listen=127.0.0.1:{kvmeta_metrics}",
        f"--database-url=sqlite+aiosqlite:///{folder / 'ledger.db'}",
    )
    engines, sidecars = [], []
    for role in ROLES:
        for index in range(shape.workers):
            worker_id = f"{role}-{index}"
            socket = folder / f"{worker_id}.sock"
            engine_port, side_channel, port, metrics = islice(ports, 4)
            engines.append(
                service(
                    f"engine-{worker_id}",
                    "sim",
                    engine_port,
                    *(f"--role={role}", f"--port={engine_port}"),
                    *(f"--side-channel-port={side_channel}", f"--events-socket={socket}"),
                    *_engine_flags(role, shape),
                )
            )
            sidecar = service(
                f"sidecar-{worker_id}",
                "worker",
                port,
                *(f"--role={role}", f"--worker-id={worker_id}"),
                f"--listen=127.0.0.1:{port}",
                f"--metrics-listen=127.0.0.1:{metrics}",
                f"--kvmeta=127.0.0.1:{kvmeta_port}",
                f"--engine-url=http://127.0.0.1:{engine_port}",
                f"--events-socket={socket}",
                # What is asked here is whether pulls are right, not whether they pay.
                "--no-pull-guard",
            )
            sidecars.append(Sidecar(worker_id, role, sidecar, metrics, engine_port))
    routers = []
    for index in range(shape.routers):
        port, gateway, metrics = islice(ports, 3)
        router = service(
            f"router-{index}",
            "router",
            port,
            f"--listen=127.0.0.1:{port}",
            f"--gateway-listen=127.0.0.1:{gateway}",
            f"--metrics-listen=127.0.0.1:{metrics}",
            f"--kvmeta=127.0.0.1:{kvmeta_port}",
            "--log-level=warning",
        )
        routers.append(Router(router, gateway, metrics))
    return Stack(kvmeta, kvmeta_metrics, tuple(engines), tuple(sidecars), tuple(routers))


@asynccontextmanager
async def running(stack: Stack) -> AsyncIterator[None]:
    """Run all processes while the block runs. They serve, but may not know each other yet.

    Raises:
        TimeoutError: one did not come up.
    """
    async with supervised(stack.services):
        yield


def _engine_flags(role: str, shape: Shape) -> list[str]:
    decodes = role == "decode"
    return [
        f"--served-model-name={MODEL}",
        f"--block-size={BLOCK_SIZE}",
        "--max-model-len=8192",
        f"--num-kv-blocks={200_000 if decodes else shape.prefill_blocks}",
        f"--max-num-seqs={shape.max_running_seqs}",
        "--max-num-batched-tokens=65536",
        "--answer-tokens=0",
        f"--inter-token-seconds={shape.inter_token_seconds if decodes else 0.0}",
        f"--decoder-kv-blocks-ttl-seconds={shape.ttl_seconds}",
        f"--pin-lease-seconds={shape.pin_lease_seconds}",
        f"--kv-lease-duration-seconds={shape.kv_lease_seconds}",
        "--log-level=warning",
    ]
