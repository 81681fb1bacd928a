"""Keeps the worker in the registry for as long as it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from kvloop.errors import InvalidFieldError, KvloopError, PreconditionError
from kvloop.kvmeta.v1 import registry_pb2
from services.common.backoff import Backoff
from services.worker.clock import Clock
from services.worker.event_hub import EventHub
from services.worker.event_messages import EngineRef, Hello
from services.worker.registry import Lease, Registry

_log = structlog.get_logger(__name__)

HEARD_SECONDS = 2.0
"""Time in which routers that follow the registry hear of a worker that has registered.

A replica of kvmeta looks once a second for what others were told, unless it is set
otherwise (`--watch-poll-seconds`); the rest is for the way.
"""
_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 5.0
_FAREWELL_SECONDS = 2.0


class Registration:
    """Registers, renews at a third of the lease, and registers again when needed.

    Args:
        registry: where to register.
        hub: says which engine is connected.
        record: makes the worker's record for an engine.
        clock: paces retries.
        ttl_seconds: lease to ask for.
    """

    def __init__(
        self,
        registry: Registry,
        hub: EventHub,
        record: Callable[[Hello], registry_pb2.Worker],
        clock: Clock,
        *,
        ttl_seconds: float,
    ) -> None:
        self._registry = registry
        self._hub = hub
        self._record = record
        self._clock = clock
        self._ttl_seconds = ttl_seconds
        self._lease: Lease | None = None
        self._lease_ends = 0.0
        self._engine: EngineRef | None = None
        self._was_registered = asyncio.Event()
        self._draining = False

    @property
    def registered(self) -> bool:
        """True while the worker holds a lease, as far as it knows."""
        return self._lease is not None and self._clock.monotonic() < self._lease_ends

    async def heard_of(self) -> None:
        """Wait until it has registered once, and routers have had the time to hear of it."""
        await self._was_registered.wait()
        await self._clock.sleep(HEARD_SECONDS)

    async def run(self) -> None:
        """Stay registered until cancelled. Outages of the registry are waited out.

        Raises:
            PreconditionError, InvalidFieldError: the registry refuses the worker
                as it is, on its first registration. Refused later, after a
                change of the registry's settings, it goes on asking: the turns
                that it runs are not at fault.
        """
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS)
        while True:
            try:
                hello = self._hub.identity or await self._hub.identity_after(None)
                if self._lease is None or self._engine != hello.ref:
                    await self._register(hello)
                else:
                    await self._renew(self._lease)
            except KvloopError as error:
                refused = isinstance(error, PreconditionError | InvalidFieldError)
                if refused and not self._was_registered.is_set():
                    raise
                _log.warning("registry_call_failed", reason=error.reason, error=error.message)
                await self._clock.sleep(backoff.next_seconds())
            else:
                backoff.reset()
                await self._until_due()

    async def drain(self) -> None:
        """Tell the registry that no new turns are taken. Best effort."""
        self._draining = True
        if self._lease is not None:
            await _best_effort(self._registry.renew(self._lease.lease_id, draining=True))

    async def leave(self) -> None:
        """End the lease. Best effort: otherwise it runs out by itself."""
        if self._lease is not None:
            await _best_effort(self._registry.deregister(self._lease.lease_id))
            self._lease = None

    async def _register(self, hello: Hello) -> None:
        record = self._record(hello)
        if self._draining:
            record.state = registry_pb2.Worker.STATE_DRAINING
        lease = await self._registry.register(record, ttl_seconds=self._ttl_seconds)
        self._engine = hello.ref
        self._was_registered.set()
        self._hold(lease)
        _log.info(
            "worker_registered",
            worker_id=record.worker_id,
            engine=hello.engine_id,
            lease_seconds=lease.granted_seconds,
        )

    async def _renew(self, lease: Lease) -> None:
        granted = await self._registry.renew(lease.lease_id, draining=self._draining)
        if granted > 0:
            self._hold(replace(lease, granted_seconds=granted))
        else:
            self._lease = None
            _log.warning("worker_lease_lost")

    def _hold(self, lease: Lease) -> None:
        self._lease = lease
        self._lease_ends = self._clock.monotonic() + lease.granted_seconds

    async def _until_due(self) -> None:
        """Wait for a third of the lease, or until the engine is another one."""
        if self._lease is None:
            return
        try:
            async with asyncio.timeout(self._lease.granted_seconds / 3):
                await self._hub.identity_after(self._engine)
        except TimeoutError:
            return


async def _best_effort(call: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(_FAREWELL_SECONDS):
            await call
    except (KvloopError, TimeoutError) as error:
        _log.warning("registry_farewell_failed", error=str(error))
