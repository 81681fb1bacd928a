"""kvmeta's own services without a network: every message is counted as it would be sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from services.kvmeta.bell import Bell
from services.kvmeta.ledger import Ledger
from services.kvmeta.ledger_service import LedgerService
from services.kvmeta.memory_store import MemoryStore
from services.kvmeta.metrics import KvmetaMetrics
from services.kvmeta.registry import LeaseBounds, Registry
from services.kvmeta.registry_service import RegistryService
from services.kvmeta.settings import KvmetaSettings, microseconds

_CONTEXT = cast(grpc.aio.ServicerContext[Any, Any], None)
"""The services ask their context nothing."""


@dataclass
class Traffic:
    """Messages in both directions."""

    messages: int = 0
    bytes: int = 0

    def add(self, *messages: Message) -> None:
        """Count them."""
        self.messages += len(messages)
        self.bytes += sum(message.ByteSize() for message in messages)


class VirtualClock:
    """The ledger's time, moved by hand. See `services.kvmeta.clock.Clock`."""

    def __init__(self) -> None:
        self.seconds = 1.7e9

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return microseconds(self.seconds)


class CountedKvmeta:
    """The ledger and the registry over a store in memory."""

    def __init__(self, clock: VirtualClock, conversations: int) -> None:
        settings = KvmetaSettings(max_conversations_per_tenant=max(conversations, 1))
        policy, metrics = settings.policy(), KvmetaMetrics(CollectorRegistry())
        store, changed, released = MemoryStore(clock, policy), Bell(), Bell()
        bounds = LeaseBounds(
            default_us=microseconds(settings.lease_ttl_seconds),
            min_us=microseconds(settings.min_lease_ttl_seconds),
            max_us=microseconds(settings.max_lease_ttl_seconds),
        )
        self._ledger = LedgerService(
            Ledger(
                store,
                clock,
                policy,
                max_params_bytes=settings.max_params_bytes,
                released=released,
                metrics=metrics,
                watch_poll_seconds=settings.watch_poll_seconds,
            )
        )
        self._registry = RegistryService(
            Registry(
                store,
                policy,
                leases=bounds,
                changed=changed,
                released=released,
                metrics=metrics,
                watch_poll_seconds=settings.watch_poll_seconds,
            )
        )

    async def take(
        self, request: ledger_pb2.TakeHandleRequest, counted: Traffic
    ) -> ledger_pb2.TakeHandleResponse:
        """TakeHandle."""
        response = await self._ledger.TakeHandle(request, _CONTEXT)
        counted.add(request, response)
        return response

    async def commit(self, request: ledger_pb2.CommitTurnRequest, counted: Traffic) -> None:
        """CommitTurn."""
        counted.add(request, await self._ledger.CommitTurn(request, _CONTEXT))

    async def renew_pins(self, request: ledger_pb2.RenewPinsRequest, counted: Traffic) -> None:
        """RenewPins."""
        counted.add(request, await self._ledger.RenewPins(request, _CONTEXT))

    async def register(self, request: registry_pb2.RegisterWorkerRequest, counted: Traffic) -> str:
        """RegisterWorker; returns the lease."""
        response = await self._registry.RegisterWorker(request, _CONTEXT)
        counted.add(request, response)
        return response.lease_id

    async def keep_alive(self, leases: Sequence[str], counted: Traffic) -> None:
        """KeepAlive, one message per lease."""

        async def requests() -> AsyncIterator[registry_pb2.KeepAliveRequest]:
            for lease in leases:
                request = registry_pb2.KeepAliveRequest(lease_id=lease)
                counted.add(request)
                yield request

        async for response in self._registry.KeepAlive(requests(), _CONTEXT):
            counted.add(response)

    async def first_state(self, counted: Traffic) -> None:
        """WatchWorkers up to SYNCED: what a router gets when it starts."""
        watch = cast(
            AsyncGenerator[registry_pb2.WatchWorkersResponse, None],
            self._registry.WatchWorkers(registry_pb2.WatchWorkersRequest(), _CONTEXT),
        )
        async with asyncio.timeout(60), aclosing(watch) as changes:
            async for change in changes:
                counted.add(change)
                if change.type == registry_pb2.WatchWorkersResponse.TYPE_SYNCED:
                    return
