"""What a gRPC server says of its health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc_handlers import Context

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health_pb2_grpc.HealthServicer):
    """Tells what a server says of itself; docs/adr/0067 has why it is two things.

    Under "": that it takes calls. Under the names of its services: that they are ready.

    Each watcher is told by itself. grpc_health's own servicer holds one lock while it
    writes to a watcher: one that reads nothing would stop the news for all, and a drain.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._leaving = False

    def begin(self, services: Sequence[str], *, ready: bool) -> None:
        """Say that the server takes calls, and whether its services are ready."""
        self._statuses = dict.fromkeys(["", *services], _SERVING)
        self.set_ready(ready)

    def set_ready(self, ready: bool) -> None:
        """Say whether the services are ready. Without effect once the server leaves."""
        if not self._leaving:
            services = [name for name in self._statuses if name]
            self._tell(services, _SERVING if ready else _NOT_SERVING)

    def leave(self) -> None:
        """Say under every name that the server takes no calls, from now on."""
        self._leaving = True
        self._tell([*self._statuses], _NOT_SERVING)

    def _tell(self, names: Sequence[str], status: int) -> None:
        self._statuses.update(dict.fromkeys(names, status))
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND if the server has no such service."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now, and whenever it is another; never ends by itself."""
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(
                request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            )
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()
