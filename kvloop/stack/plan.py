"""Which processes a stack runs, with which flags. Nothing here starts anything."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvloop.stack.certificates import Part, StackCertificates
from kvloop.stack.gpus import place
from kvloop.stack.ports import LOOPBACK, PortPool
from kvloop.stack.settings import StackSettings, WorkerSettings

KVMETA, ROUTER = "kvmeta", "router"

_FIRST_PORTS = {
    "prefill": {"sidecar": 7300, "engine": 8100, "side_channel": 5600},
    "decode": {"sidecar": 7400, "engine": 8200, "side_channel": 5700},
}


@dataclass(frozen=True, slots=True)
class EntryPoints:
    """How each service is started; its flags follow.

    The services are processes of their own, so nothing of them is imported here.
    """

    kvmeta: tuple[str, ...] = (sys.executable, "-m", "services.kvmeta")
    router: tuple[str, ...] = (sys.executable, "-m", "services.router")
    worker: tuple[str, ...] = (sys.executable, "-m", "services.worker")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process.

    Attributes:
        name: "kvmeta", "router", "prefill-0", "decode-0", ...
        argv: command with all flags.
        env: what it gets on top of this process's environment.
        address: host:port of its gRPC server.
        gateway_url: URL of its OpenAI-compatible HTTP server, for the router.
        log: what it writes to stdout and stderr.
        engine_log: log of its vLLM server, for workers.
        engine_url: URL of its vLLM server, for workers.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    address: str
    log: Path
    engine_log: Path | None = None
    engine_url: str = ""
    gateway_url: str = ""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """All processes of a stack."""

    kvmeta: ProcessSpec
    router: ProcessSpec
    workers: tuple[ProcessSpec, ...] = field(default=())

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All of them, in the order in which they are started."""
        return (self.kvmeta, self.router, *self.workers)


def plan_stack(
    settings: StackSettings,
    entry_points: EntryPoints,
    ports: PortPool,
    run_dir: Path,
    certificates: StackCertificates | None = None,
) -> StackPlan:
    """Lay a stack out.

    Args:
        settings: what it consists of.
        entry_points: how each service is started.
        ports: where ports come from.
        run_dir: folder for logs, sockets and the database.
        certificates: for mutual TLS everywhere; without them nothing is encrypted.
    """
    flags = _tls_flags(certificates)
    kvmeta_address = f"{LOOPBACK}:{ports.take(7200)}"
    router_address = f"{LOOPBACK}:{ports.take(7100)}"
    gateway_address = f"{LOOPBACK}:{ports.take(7180)}"
    counts = {"prefill": 0, "decode": 0}
    workers = []
    for index, worker in enumerate(settings.workers):
        name = f"{worker.role}-{counts[worker.role]}"
        counts[worker.role] += 1
        workers.append(
            _plan_worker(
                name,
                index,
                worker,
                settings,
                entry_points,
                ports,
                run_dir,
                kvmeta_address,
                flags[Part.WORKER],
            )
        )
    return StackPlan(
        kvmeta=ProcessSpec(
            name=KVMETA,
            argv=(
                *entry_points.kvmeta,
                *("--listen", kvmeta_address),
                *("--database-url", f"sqlite:///{run_dir / 'ledger.db'}"),
                *flags[Part.KVMETA],
                *settings.kvmeta_args,
            ),
            env={**settings.env, "KVLOOP_KVMETA_LOG_JSON": "true"},
            address=kvmeta_address,
            log=run_dir / "kvmeta.log",
        ),
        router=ProcessSpec(
            name=ROUTER,
            argv=(
                *entry_points.router,
                *("--listen", router_address),
                *("--gateway-listen", gateway_address),
                *("--kvmeta", kvmeta_address),
                *flags[Part.ROUTER],
                *settings.router_args,
            ),
            env={**settings.env, "KVLOOP_ROUTER_LOG_JSON": "true"},
            address=router_address,
            log=run_dir / "router.log",
            gateway_url=f"{'http' if certificates is None else 'https'}://{gateway_address}",
        ),
        workers=tuple(workers),
    )


def _tls_flags(certificates: StackCertificates | None) -> dict[Part, tuple[str, ...]]:
    """Flags of each kind of service: who it is, and who may call it."""
    if certificates is None:
        return dict.fromkeys(Part, ())
    callers_of_kvmeta = (Part.ROUTER, Part.WORKER, Part.OPERATOR)
    return {
        Part.KVMETA: certificates.serving_flags(Part.KVMETA, allowed=callers_of_kvmeta),
        Part.ROUTER: (
            *certificates.serving_flags(Part.ROUTER),
            *certificates.calling_flags(Part.ROUTER),
            f"--peer-tls-worker-name={Part.WORKER.dns_name}",
        ),
        Part.WORKER: (
            *certificates.serving_flags(Part.WORKER, allowed=(Part.ROUTER, Part.OPERATOR)),
            *certificates.calling_flags(Part.WORKER),
        ),
    }


def _plan_worker(
    name: str,
    index: int,
    worker: WorkerSettings,
    settings: StackSettings,
    entry_points: EntryPoints,
    ports: PortPool,
    run_dir: Path,
    kvmeta_address: str,
    tls_flags: tuple[str, ...],
) -> ProcessSpec:
    first = _FIRST_PORTS[worker.role]
    address = f"{LOOPBACK}:{ports.take(first['sidecar'])}"
    engine_port = ports.take(first["engine"])
    engine_log = run_dir / f"{name}.engine.log"
    gpu_env, gpu_args = place(index, len(settings.workers), settings.gpus)
    # Given flags come last: vLLM takes the last of two equal flags.
    engine_args = [*gpu_args, *shlex.split(worker.engine_args)]
    flags = {
        "--role": worker.role,
        "--worker-id": name,
        "--listen": address,
        "--advertise": address,
        "--kvmeta": kvmeta_address,
        "--model": settings.model,
        "--served-model-name": settings.model_name,
        "--engine-port": str(engine_port),
        "--side-channel-host": LOOPBACK,
        "--side-channel-port": str(ports.take(first["side_channel"])),
        "--events-socket": str(run_dir / f"{name}.sock"),
        "--engine-log": str(engine_log),
        "--kv-recompute-threshold": str(worker.kv_recompute_threshold),
        "--decoder-kv-blocks-ttl-seconds": str(worker.decoder_kv_blocks_ttl_seconds),
        "--engine-start-timeout-seconds": f"{settings.start_timeout_seconds:g}",
    }
    # "--flag=value", since a value such as the engine's flags may start with "-".
    argv = [f"{flag}={value}" for flag, value in flags.items()]
    if engine_args:
        argv.append(f"--engine-args={shlex.join(engine_args)}")
    if settings.engine_python:
        argv.append(f"--engine-python={settings.engine_python}")
    return ProcessSpec(
        name=name,
        argv=(*entry_points.worker, *argv, *tls_flags, *worker.args),
        env={**settings.env, **gpu_env, **worker.env, "KVLOOP_WORKER_LOG_JSON": "true"},
        address=address,
        log=run_dir / f"{name}.log",
        engine_log=engine_log,
        engine_url=f"http://{LOOPBACK}:{engine_port}",
    )
