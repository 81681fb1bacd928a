"""The port to the worker registry in kvmeta."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvloop import rpc
from kvloop.durations import to_duration, to_seconds
from kvloop.errors import UnavailableError
from kvloop.kvmeta.v1 import registry_pb2, registry_pb2_grpc

_CALL_SECONDS = 5.0


@dataclass(frozen=True)
class Lease:
    """A worker's place in the registry, for a while."""

    lease_id: str
    granted_seconds: float


class Registry(Protocol):
    """Where workers announce themselves.

    All calls raise:
        UnavailableError, DeadlineError: the registry cannot be reached.
    """

    async def register(self, worker: registry_pb2.Worker, *, ttl_seconds: float) -> Lease:
        """Announce a worker.

        Raises:
            PreconditionError, InvalidFieldError: it is not acceptable as it is.
        """

    async def renew(self, lease_id: str, *, draining: bool) -> float:
        """Renew a lease.

        Returns:
            Seconds granted from now; 0 if the lease is gone.
        """

    async def deregister(self, lease_id: str) -> None:
        """End a lease."""


class GrpcRegistry:
    """The registry over gRPC.

    Args:
        channel: to kvmeta; not closed here.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = registry_pb2_grpc.RegistryServiceStub(channel)

    async def register(self, worker: registry_pb2.Worker, *, ttl_seconds: float) -> Lease:
        """Announce a worker."""
        request = registry_pb2.RegisterWorkerRequest(worker=worker, ttl=to_duration(ttl_seconds))
        with rpc.typed_errors():
            reply = await self._stub.RegisterWorker(request, timeout=_CALL_SECONDS)
        return Lease(reply.lease_id, to_seconds(reply.granted_ttl))

    async def renew(self, lease_id: str, *, draining: bool) -> float:
        """Renew a lease, on a stream of its own: there is one every few seconds."""
        request = registry_pb2.KeepAliveRequest(
            lease_id=lease_id,
            state=registry_pb2.Worker.STATE_DRAINING
            if draining
            else registry_pb2.Worker.STATE_ACTIVE,
        )

        async def requests() -> AsyncIterator[registry_pb2.KeepAliveRequest]:
            yield request

        with rpc.typed_errors():
            async for reply in self._stub.KeepAlive(requests(), timeout=_CALL_SECONDS):
                return to_seconds(reply.granted_ttl)
        raise UnavailableError("the registry closed the stream without an answer")

    async def deregister(self, lease_id: str) -> None:
        """End a lease."""
        with rpc.typed_errors():
            await self._stub.DeregisterWorker(
                registry_pb2.DeregisterWorkerRequest(lease_id=lease_id), timeout=_CALL_SECONDS
            )
