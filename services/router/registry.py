"""Follows the worker registry and keeps the pool in step with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import grpc
import structlog

from kvloop.errors import KvloopError, OutOfRangeError
from kvloop.kvmeta.v1 import registry_pb2, registry_pb2_grpc
from services.common import long_streams
from services.common.backoff import Backoff
from services.router.workers import WorkerPool

_log = structlog.get_logger(__name__)
_Change = registry_pb2.WatchWorkersResponse


class Registry(Protocol):
    """Says which workers are alive."""

    def watch(self, after_revision: int) -> AsyncGenerator[registry_pb2.WatchWorkersResponse, None]:
        """The live workers, one SYNCED, then every change.

        It ends now and then; whoever watches goes on after the last revision.

        Args:
            after_revision: send what changed since in place of the live workers;
                0 sends those.

        Raises:
            OutOfRangeError: what changed since is not known any more.
            KvloopError: the registry cannot be reached any more.
        """
        ...


class GrpcRegistry:
    """The registry of a kvmeta service. See `Registry`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = registry_pb2_grpc.RegistryServiceStub(channel)

    async def watch(
        self, after_revision: int
    ) -> AsyncGenerator[registry_pb2.WatchWorkersResponse, None]:
        """See `Registry.watch`."""
        call = self._stub.WatchWorkers(
            registry_pb2.WatchWorkersRequest(after_revision=after_revision)
        )
        async with aclosing(long_streams.messages(call)) as changes:
            async for change in changes:
                yield change


class RegistryFollower:
    """Applies the registry's changes to the pool, through outages of the registry.

    While it cannot be reached the pool keeps what it knows. Afterwards it goes on
    after the last change it has seen. If the registry does not remember that far
    back, it starts anew; workers that come back late are not dropped in between:
    see `WorkerPool.keep_only`.

    Args:
        registry: whose changes.
        pool: what they are applied to.
        backoff: paces attempts during an outage.
    """

    def __init__(self, registry: Registry, pool: WorkerPool, *, backoff: Backoff) -> None:
        self._registry = registry
        self._pool = pool
        self._backoff = backoff
        self._connected = False
        self._synced_once = asyncio.Event()
        self._revision = 0
        self._seen: set[str] = set()

    @property
    def connected(self) -> bool:
        """Whether the pool is in step with the registry now."""
        return self._connected

    async def synced_once(self, seconds: float) -> bool:
        """Wait until the pool has been in step with the registry; False if it takes longer."""
        try:
            async with asyncio.timeout(seconds):
                await self._synced_once.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Follow until cancelled."""
        outage_told = False
        while True:
            try:
                await self._follow()
            except KvloopError as error:
                if isinstance(error, OutOfRangeError) and self._revision:
                    self._revision = 0
                    continue
                if self._connected or not outage_told:
                    _log.warning("registry_lost", reason=error.reason, detail=error.message)
                self._connected, outage_told = False, True
            await asyncio.sleep(self._backoff.next_seconds())

    async def _follow(self) -> None:
        if self._revision == 0:
            self._seen.clear()
        async with aclosing(self._registry.watch(self._revision)) as changes:
            async for change in changes:
                await self._apply(change)
                synced = change.type == _Change.TYPE_SYNCED
                if synced or self._revision:  # half of the live workers is no place to resume at
                    self._revision = change.revision

    async def _apply(self, change: registry_pb2.WatchWorkersResponse) -> None:
        worker = change.worker
        match change.type:
            case _Change.TYPE_ADDED | _Change.TYPE_CHANGED:
                self._seen.add(worker.worker_id)
                await self._pool.put(worker)
            case _Change.TYPE_REMOVED:
                self._seen.discard(worker.worker_id)
                self._pool.remove(worker.worker_id)
            case _Change.TYPE_SYNCED:
                self._pool.keep_only(self._seen)
                if not self._connected:
                    _log.info("registry_synced", workers=len(self._seen))
                self._connected = True
                self._synced_once.set()
                self._backoff.reset()
