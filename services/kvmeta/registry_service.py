"""The gRPC edge of the registry: convert, one call, convert back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from kvloop.kvmeta.v1 import registry_pb2, registry_pb2_grpc
from services.kvmeta import bounds, paging
from services.kvmeta.conversion import (
    change_to_proto,
    duration,
    entry_to_proto,
    role_from_proto,
    state_from_proto,
    worker_from_proto,
)
from services.kvmeta.registry import Registry

_Context = grpc.aio.ServicerContext[Any, Any]


class RegistryService(registry_pb2_grpc.RegistryServiceServicer):
    """RegistryService over a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def RegisterWorker(
        self, request: registry_pb2.RegisterWorkerRequest, context: _Context
    ) -> registry_pb2.RegisterWorkerResponse:
        """Give a worker a lease."""
        registered = await self._registry.register(
            worker_from_proto(request.worker),
            bounds.duration_us(request.ttl, "ttl", zero_allowed=True),
        )
        return registry_pb2.RegisterWorkerResponse(
            lease_id=registered.lease_id,
            granted_ttl=duration(registered.lease_ttl_us),
            voided_handles=registered.voided_handles,
            handle_ttl=duration(registered.handle_ttl_us),
        )

    async def KeepAlive(
        self, request_iterator: AsyncIterator[registry_pb2.KeepAliveRequest], context: _Context
    ) -> AsyncIterator[registry_pb2.KeepAliveResponse]:
        """Renew leases, one answer per message."""
        async for request in request_iterator:
            granted = await self._registry.keep_alive(
                _lease_id(request.lease_id), state_from_proto(request.state, "state")
            )
            yield registry_pb2.KeepAliveResponse(
                lease_id=request.lease_id, granted_ttl=duration(granted)
            )

    async def DeregisterWorker(
        self, request: registry_pb2.DeregisterWorkerRequest, context: _Context
    ) -> registry_pb2.DeregisterWorkerResponse:
        """End a lease."""
        await self._registry.deregister(_lease_id(request.lease_id))
        return registry_pb2.DeregisterWorkerResponse()

    async def ListWorkers(
        self, request: registry_pb2.ListWorkersRequest, context: _Context
    ) -> registry_pb2.ListWorkersResponse:
        """List live workers."""
        model = bounds.optional_text(request.model, "model", most=bounds.MAX_MODEL) or None
        role = role_from_proto(request.role, "role")
        size = bounds.page_size(request.page_size)
        query = [model or "", role or ""]
        after = paging.worker_position(query, request.page_token)
        entries = await self._registry.page(model, role, after, size + 1)
        token = ""
        if len(entries) > size:
            last, _ = entries[size - 1]
            token = paging.worker_token(query, last.worker.worker_id)
        return registry_pb2.ListWorkersResponse(
            workers=[entry_to_proto(record, retained) for record, retained in entries[:size]],
            next_page_token=token,
        )

    async def WatchWorkers(
        self, request: registry_pb2.WatchWorkersRequest, context: _Context
    ) -> AsyncIterator[registry_pb2.WatchWorkersResponse]:
        """Stream the live workers and every change."""
        async with aclosing(self._registry.watch(request.after_revision)) as changes:
            async for change in changes:
                yield change_to_proto(change)


def _lease_id(value: str) -> str:
    return bounds.text(value, "lease_id", most=bounds.MAX_LEASE_ID)
