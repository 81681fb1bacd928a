"""Several router processes on one port, and the parent that keeps them running.

The kernel spreads connections over them (SO_REUSEPORT). They share nothing but the
ports and the metrics endpoint: each follows the registry, limits turns and chooses
workers by itself, as replicas do.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common import (
    grpc_core,  # noqa: F401, which comes before gRPC
    metrics_http,
    metrics_shares,
)
from services.common.addresses import split_host_port
from services.common.child_process import ParentLink, SpawnedChild
from services.common.process import reload_on_hangup
from services.common.shared_ports import reserve
from services.common.supervisor import Supervisor
from services.router.app import Place
from services.router.serving import Ready, run, serve
from services.router.settings import RouterSettings

_log = structlog.get_logger(__name__)

_MARGIN_SECONDS = 10.0


@dataclass(frozen=True)
class Work:
    """What one of several processes is to do."""

    settings: RouterSettings
    """Its own: the addresses have their ports, and the parent serves the metrics."""
    place: Place
    """Among the others."""


async def serve_all(settings: RouterSettings, stop: asyncio.Event) -> None:
    """Keep `settings.processes` routers running until `stop` is set.

    Raises:
        OSError: an address cannot be bound, a process could not start, or the
            temporary folder's path is too long for sockets.
    """
    with (
        _metrics_folder(settings.processes) as folder,
        reserve(settings.listen) as listen,
        _gateway_port(settings) as gateway_listen,
        _metrics_port(settings, folder) as metrics_port,
    ):
        own = settings.model_copy(
            update={"listen": listen, "gateway_listen": gateway_listen, "metrics_listen": None}
        )

        def start(number: int) -> SpawnedChild[Work]:
            return SpawnedChild(_serve_child, Work(own, Place(number, folder)), number)

        supervisor = Supervisor(
            settings.processes,
            start,
            patience_seconds=_patience_seconds(settings),
            clock=time.monotonic,
        )
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(_tell(supervisor, own, metrics_port), name="tell")
            with reload_on_hangup(supervisor.hang_up):
                try:
                    await supervisor.run(stop)
                finally:
                    telling.cancel()


def _serve_child(link: ParentLink, work: Work) -> None:
    """The main function of each process."""

    async def serving(stop: asyncio.Event) -> None:
        with link.stop_when_alone(stop, _patience_seconds(work.settings)):
            ready: Ready = lambda _: link.serving()  # noqa: E731
            await serve(work.settings, stop, ready, work.place)

    structlog.contextvars.bind_contextvars(process=work.place.number)
    run(work.settings, serving)


async def _tell(supervisor: Supervisor, settings: RouterSettings, metrics_port: int | None) -> None:
    await supervisor.up.wait()
    gateway = settings.gateway_listen
    _log.info(
        "router_serving",
        processes=settings.processes,
        listen=settings.listen,
        port=split_host_port(settings.listen)[1],
        kvmeta=settings.kvmeta,
        gateway_listen=gateway,
        gateway_port=split_host_port(gateway)[1] if gateway else None,
        metrics_port=metrics_port,
    )


def _patience_seconds(settings: RouterSettings) -> float:
    """More than a process takes to leave that does as it should.

    Its two servers give turns in flight their time one after the other.
    """
    return settings.drain_seconds + 2 * settings.shutdown_grace_seconds + _MARGIN_SECONDS


@contextmanager
def _metrics_folder(processes: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvloop-router-") as name:
        folder = Path(name)
        metrics_shares.check_folder(folder, processes)
        yield folder


@contextmanager
def _gateway_port(settings: RouterSettings) -> Iterator[str]:
    if not settings.gateway_listen:
        yield ""
        return
    with reserve(settings.gateway_listen) as address:
        yield address


@contextmanager
def _metrics_port(settings: RouterSettings, folder: Path) -> Iterator[int | None]:
    if settings.metrics_listen is None:
        yield None
        return
    with metrics_http.serve(metrics_shares.of_all(folder), settings.metrics_listen) as port:
        yield port
