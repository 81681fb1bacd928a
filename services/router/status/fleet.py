"""What kvmeta knows of workers and conversations, for the status page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvloop.rpc import typed_errors

MAX_WORKERS = 1000
"""Workers asked for; more than a page can show."""


@dataclass(frozen=True)
class Conversations:
    """The most recent conversations of a tenant."""

    shown: Sequence[ledger_pb2.Conversation]
    more: bool
    """Whether there are others."""


class Fleet(Protocol):
    """Reads the registry and the ledger.

    Raises:
        KvloopError: kvmeta cannot be reached, or does not answer in time.
    """

    async def workers(self) -> Sequence[registry_pb2.WorkerEntry]:
        """All live workers, by id."""
        ...

    async def conversations(self, tenant: str, limit: int) -> Conversations:
        """A tenant's conversations, most recently committed first."""
        ...


class GrpcFleet:
    """kvmeta over gRPC. See `Fleet`.

    Args:
        channel: to kvmeta; not closed here.
        timeout_seconds: for each call.
    """

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float) -> None:
        self._registry = registry_pb2_grpc.RegistryServiceStub(channel)
        self._ledger = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._timeout_seconds = timeout_seconds

    async def workers(self) -> Sequence[registry_pb2.WorkerEntry]:
        """See `Fleet.workers`."""
        request = registry_pb2.ListWorkersRequest(page_size=MAX_WORKERS)
        with typed_errors():
            found = await self._registry.ListWorkers(request, timeout=self._timeout_seconds)
        return found.workers

    async def conversations(self, tenant: str, limit: int) -> Conversations:
        """See `Fleet.conversations`."""
        request = ledger_pb2.ListConversationsRequest(tenant=tenant, page_size=limit)
        with typed_errors():
            found = await self._ledger.ListConversations(request, timeout=self._timeout_seconds)
        return Conversations(found.conversations, bool(found.next_page_token))
