"""Builds kvmeta from its settings: the only place that knows every part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import grpc
import structlog
from prometheus_client import CollectorRegistry

from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.common import metrics_http, rpc_server
from services.common.process import reload_all
from services.common.rpc_tracing import spans
from services.kvmeta.bell import Bell
from services.kvmeta.clock import Clock, HostTime
from services.kvmeta.database import open_store
from services.kvmeta.ledger import Ledger
from services.kvmeta.ledger_service import LedgerService
from services.kvmeta.metrics import KvmetaMetrics
from services.kvmeta.registry import LeaseBounds, Registry
from services.kvmeta.registry_service import RegistryService
from services.kvmeta.settings import KvmetaSettings, microseconds
from services.kvmeta.store import Store
from services.kvmeta.sweeper import Sweeper

_log = structlog.get_logger(__name__)

_SPANS = {"TakeHandle": "TakeHandle", "CommitTurn": "CommitTurn", "ReturnHandle": "ReturnHandle"}
"""Calls of turns, and the names of their spans."""


@dataclass(frozen=True)
class Kvmeta:
    """A kvmeta that serves."""

    port: int
    """Port of the gRPC server."""
    metrics_port: int | None
    """Port of the Prometheus endpoint, if there is one."""
    metrics: KvmetaMetrics
    """Its counters."""
    store: Store
    """What it remembers."""
    sweeper: Sweeper
    """What lets time pass in the store."""
    reload: Callable[[], None]
    """Reads the files again that may be replaced while it serves."""


@asynccontextmanager
async def build(
    settings: KvmetaSettings,
    *,
    clock: Clock | None = None,
    store: Store | None = None,
    host: HostTime | None = None,
) -> AsyncIterator[Kvmeta]:
    """Serve the ledger and the registry while the block runs.

    The order is: database and migrations, the ledger's clock, leases that were
    granted before, gRPC server, background tasks. At the end, in reverse: calls
    in flight get `shutdown_grace_seconds`, waiting writes are finished.

    Args:
        settings: the service's settings.
        clock: the ledger's clock; the one kept in the database if omitted.
        store: a store to use in place of the one of `settings.database_url`.
        host: this machine's clocks.

    Raises:
        OSError: an address cannot be bound, or a file cannot be read.
        UnavailableError: the database cannot be reached, or refuses kvmeta.
    """
    policy = settings.policy()
    tls = settings.server_tls()
    metrics = KvmetaMetrics(CollectorRegistry())
    changed, released = Bell(), Bell()
    async with AsyncExitStack() as stack:
        tracing = await stack.enter_async_context(settings.open_tracing("kvloop-kvmeta"))
        opened = await stack.enter_async_context(
            open_store(settings, policy, host or HostTime(), clock=clock, store=store)
        )
        metrics.voided(opened.voided_handles)
        # The ledger was away, so workers could not renew.
        leases = await opened.store.extend_leases()
        _log.info("store_opened", leases=leases, voided_handles=opened.voided_handles)

        sweeper = Sweeper(
            opened.store,
            opened.clock,
            batch_rows=settings.sweep_batch_rows,
            changed=changed,
            released=released,
            metrics=metrics,
        )
        ledger = Ledger(
            opened.store,
            opened.clock,
            policy,
            max_params_bytes=settings.max_params_bytes,
            released=released,
            metrics=metrics,
            watch_poll_seconds=settings.watch_poll_seconds,
        )
        registry = Registry(
            opened.store,
            policy,
            leases=_lease_bounds(settings),
            changed=changed,
            released=released,
            metrics=metrics,
            watch_poll_seconds=settings.watch_poll_seconds,
        )
        metrics_port = (
            stack.enter_context(metrics_http.expose(metrics.registry, settings.metrics_listen))
            if settings.metrics_listen is not None
            else None
        )
        port = await stack.enter_async_context(
            rpc_server.serve(
                settings.listen,
                lambda server: _add_services(server, ledger, registry),
                [
                    ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"],
                    registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
                ],
                grace_seconds=settings.shutdown_grace_seconds,
                tls=tls,
                registry=metrics.registry,
                drain=rpc_server.Drain(settings.drain_seconds),
                around=spans(tracing, _SPANS),
            )
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = [tasks.create_task(sweeper.run(settings.sweep_interval_seconds), name="sweeper")]
        if opened.keep_clock is not None:
            running.append(tasks.create_task(opened.keep_clock(), name="clock"))
        for task in running:
            stack.callback(task.cancel)
        yield Kvmeta(port, metrics_port, metrics, opened.store, sweeper, partial(reload_all, tls))


def _add_services(server: grpc.aio.Server, ledger: Ledger, registry: Registry) -> None:
    ledger_pb2_grpc.add_LedgerServiceServicer_to_server(LedgerService(ledger), server)
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryService(registry), server)


def _lease_bounds(settings: KvmetaSettings) -> LeaseBounds:
    return LeaseBounds(
        default_us=microseconds(settings.lease_ttl_seconds),
        min_us=microseconds(settings.min_lease_ttl_seconds),
        max_us=microseconds(settings.max_lease_ttl_seconds),
    )
