"""The gRPC server that every service runs: error mapping, metrics, health, reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from kvloop import rpc
from kvloop.errors import InternalError, KvloopError, to_status
from services.common.rpc_handlers import Around, AroundInterceptor, AroundMethod, Context
from services.common.rpc_health import Health
from services.common.rpc_metrics import RpcMetrics
from services.common.tls import ServerTls
from services.common.tls_clients import only_clients

_log = structlog.get_logger(__name__)

_REQUEST_WINDOW_BYTES = 4 * 1024 * 1024
"""Bytes of one call that may arrive before they are read."""


def _answered(metrics: RpcMetrics) -> AroundMethod:
    """Turns raised errors into a status, and times calls; the only place that aborts one.

    A KvloopError becomes its own status with ErrorInfo. Anything else is a
    defect: the caller gets INTERNAL with a fixed text, the log the traceback.
    """

    def of_method(method: str) -> Around:
        @asynccontextmanager
        async def around(context: Context, request: object) -> AsyncIterator[None]:
            with metrics.call(method, context):
                try:
                    yield
                except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
                    raise
                except Exception as error:
                    await _abort(method, context, error)

        return around

    return of_method


async def _abort(method: str, context: Context, error: Exception) -> NoReturn:
    if not isinstance(error, KvloopError):
        _log.exception("rpc_failed", method=method, exc_info=error)
        error = InternalError("internal error; the service's log has the details")
    await context.abort_with_status(rpc_status.to_status(to_status(error)))


class Drain:
    """How a server leaves: it says so first, and takes calls until its clients know.

    Args:
        seconds: time for health watchers and load balancers to turn away.
        sleep: waits; for tests.
    """

    def __init__(
        self, seconds: float = 0.0, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._seconds = seconds
        self._sleep = sleep
        self.health = Health()
        self.started = False
        """Whether the server is leaving."""

    async def run(self) -> None:
        """Say NOT_SERVING under every name, and wait the first time that this is called."""
        if self.started:
            return
        self.started = True
        self.health.leave()
        await self._sleep(self._seconds)


@asynccontextmanager
async def serve(
    address: str,
    add_services: Callable[[grpc.aio.Server], None],
    services: Sequence[ServiceDescriptor],
    *,
    grace_seconds: float,
    tls: ServerTls | None = None,
    registry: CollectorRegistry | None = None,
    drain: Drain | None = None,
    around: Sequence[AroundMethod] = (),
    share_port: bool = False,
    ready: bool = True,
) -> AsyncIterator[int]:
    """Run a gRPC server while the block runs.

    Health is SERVING inside the block (see `rpc_health.Health`) and NOT_SERVING while it drains;
    then the server stops, and calls in flight get grace_seconds to finish. Calls that
    come while a server stops fail, by no fault of their own.

    Args:
        address: host:port to listen on; port 0 takes a free one.
        add_services: registers the servicers.
        services: descriptors of those services, for health and reflection.
        grace_seconds: time for calls in flight at the end.
        tls: how to encrypt, and who may call; without it nothing is encrypted.
        registry: where Prometheus finds how long calls take; nowhere if omitted.
        drain: how it leaves; at once if omitted.
        around: what calls run inside of; sees the errors that methods raise.
        share_port: other processes listen on the same port.
        ready: whether the services are ready from the start; `drain.health` is told
            when that changes.

    Yields:
        The port.

    Raises:
        OSError: the address cannot be bound.
    """
    blocks = [_answered(RpcMetrics(registry or CollectorRegistry()))]
    if tls is not None and tls.allowed_clients:
        blocks.append(only_clients(tls.allowed_clients))
    server = grpc.aio.server(
        interceptors=[AroundInterceptor([*blocks, *around])],
        options=[
            *rpc.OPTIONS,
            ("grpc.so_reuseport", int(share_port)),
            # Long prompts come in one go. gRPC would let 64 KiB in at first, and more
            # only after a round of measuring.
            ("grpc.http2.lookahead_bytes", _REQUEST_WINDOW_BYTES),
            ("grpc.http2.bdp_probe", 0),
            # By default gRPC cancels calls at random once 1000 wait to be accepted.
            ("grpc.server.max_pending_requests", 20_000),
            ("grpc.server.max_pending_requests_hard_limit", 40_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ],
    )
    add_services(server)
    drain = drain or Drain()
    health_pb2_grpc.add_HealthServicer_to_server(drain.health, server)
    names = [service.full_name for service in services]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    try:
        port = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, tls.grpc_credentials())
        )
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    drain.health.begin(names, ready=ready)
    await server.start()
    try:
        yield port
    finally:
        await drain.run()
        await server.stop(grace_seconds)
