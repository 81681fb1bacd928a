"""Builds a sidecar from its settings: the only place that knows every part."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from kvloop.kvmeta.v1 import registry_pb2
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.common import metrics_http, rpc_server
from services.common.addresses import join_host_port, split_host_port
from services.common.process import reload_all
from services.common.replicated_channel import open_replicated_channel
from services.common.rpc_tracing import spans
from services.worker import events
from services.worker.admission import Admission
from services.worker.clock import Clock, SystemClock
from services.worker.commits import CommitLimits, TurnCommitter
from services.worker.decode import DecodeLeg, DecodeOrder
from services.worker.engine import Engine
from services.worker.engine_command import CONNECTION_SECONDS
from services.worker.engine_process import EngineProcess
from services.worker.event_hub import EventHub
from services.worker.event_messages import Hello
from services.worker.http_engine import KEEP_ALIVE_SECONDS, open_engine
from services.worker.launcher import launch
from services.worker.ledger import GrpcLedger, Ledger
from services.worker.metrics import WorkerMetrics
from services.worker.pin_ledger import GrpcPinLedger, PinLedger
from services.worker.prefill import PrefillLeg, PrefillOrder
from services.worker.preparations import Preparations
from services.worker.pull_costs import GuardLimits, PullCosts
from services.worker.readiness import until_ready, watch_health, watch_process
from services.worker.registration import Registration
from services.worker.registry import GrpcRegistry, Registry
from services.worker.releases import GrpcReleaseFeed, ReleaseFeed, ReleaseFollower
from services.worker.retention import look_after_pins
from services.worker.service import WorkerParts, WorkerService
from services.worker.settings import WorkerSettings
from services.worker.tasks import background_tasks
from services.worker.worker_record import check_reachable, check_role, worker_record

_SPANS = {"Prefill": "prefill", "Decode": "decode"}
"""Calls of turns, and the names of their spans."""


@dataclass(frozen=True)
class Worker:
    """A sidecar that serves."""

    port: int
    """Port of the gRPC server."""
    address: str
    """host:port where routers reach it."""
    admission: Admission
    registration: Registration
    metrics: WorkerMetrics
    reload: Callable[[], None]
    """Reads the files again that may be replaced while it serves."""


@asynccontextmanager
async def build(
    settings: WorkerSettings,
    *,
    clock: Clock | None = None,
    engine: Engine | None = None,
    ledger: Ledger | None = None,
    registry: Registry | None = None,
    releases: ReleaseFeed | None = None,
    pin_ledger: PinLedger | None = None,
) -> AsyncIterator[Worker]:
    """Serve one leg on one engine while the block runs.

    The order is: event socket, engine, its connector's hello, gRPC server,
    registration, health. At the end, in reverse: no new legs, draining, those in flight
    get `grace_seconds`, decode reads what they have handed over, the lease ends, the
    engine is stopped if it was started here. If the engine ends first, the block is
    cancelled and the error raised.

    Args:
        settings: the sidecar's settings.
        clock: the time.
        engine: an engine to use in place of one over HTTP; none is started.
        ledger: the conversation ledger; kvmeta's if omitted.
        registry: the worker registry; kvmeta's if omitted.
        releases: what the ledger wants freed; kvmeta's if omitted.
        pin_ledger: says which pins are wanted; kvmeta's if omitted.

    Raises:
        OSError: an address or the event socket cannot be bound, or a file cannot
            be read.
        UnavailableError: the engine did not start, or has ended.
        PreconditionError: engine, connector or registry do not fit together.
    """
    clock = clock or SystemClock()
    counters = WorkerMetrics()
    tls = settings.server_tls()
    kvmeta_tls = settings.peer_tls(settings.peer_tls_kvmeta_name)
    _require_free(settings.listen)
    async with AsyncExitStack() as stack:
        tracing = await stack.enter_async_context(
            settings.open_tracing(f"kvloop-{settings.role}", settings.worker_id)
        )
        if settings.metrics_listen is not None:
            stack.enter_context(metrics_http.expose(counters.registry, settings.metrics_listen))
        hub = EventHub(clock, counters)
        await stack.enter_async_context(events.listen(settings.events_socket, hub, counters))

        process: EngineProcess | None = None
        if engine is None:
            if settings.engine_url is None:
                _require_reachable(settings, settings.side_channel_host)
                process = await stack.enter_async_context(launch(settings))
            engine = await stack.enter_async_context(
                open_engine(
                    settings.engine_base_url,
                    max_connections=settings.engine_max_connections,
                    connect_timeout_seconds=settings.engine_connect_timeout_seconds,
                    keep_alive_seconds=KEEP_ALIVE_SECONDS
                    if process is None
                    else CONNECTION_SECONDS,
                )
            )
        model, hello = await until_ready(
            engine,
            hub,
            process,
            clock,
            model_name=settings.model_name,
            start_timeout_seconds=settings.engine_start_timeout_seconds,
            hello_timeout_seconds=settings.hello_timeout_seconds,
        )
        check_role(hello, settings.role)
        _require_reachable(settings, hello.side_channel_host)

        channel = await stack.enter_async_context(
            open_replicated_channel(settings.kvmeta, kvmeta_tls)
        )
        host, _ = split_host_port(settings.listen)
        address = settings.advertise or settings.listen  # until the port is known

        def record(hello: Hello) -> registry_pb2.Worker:
            return worker_record(
                hello,
                role=settings.role,
                worker_id=settings.worker_id,
                address=address,
                model=model.name,
                prepared_legs=settings.prepared_legs_limit,
            )

        registration = Registration(
            registry or GrpcRegistry(channel),
            hub,
            record,
            clock,
            ttl_seconds=settings.lease_ttl_seconds,
        )
        stack.push_async_callback(registration.leave)
        tasks = await stack.enter_async_context(background_tasks())
        admission = Admission(counters)
        committer = TurnCommitter(
            settings.worker_id,
            ledger or GrpcLedger(channel),
            hub,
            clock,
            counters,
            tasks,
            CommitLimits(
                event_timeout_seconds=settings.event_timeout_seconds,
                commit_timeout_seconds=settings.commit_timeout_seconds,
                settle_timeout_seconds=settings.settle_timeout_seconds,
            ),
        )
        limit = settings.prepared_legs_limit
        prepared_prefill = Preparations[PrefillOrder](
            engine, admission, counters, tasks, limit=limit
        )
        prepared_decode = Preparations[DecodeOrder](engine, admission, counters, tasks, limit=limit)
        costs = PullCosts(lambda: hub.identity, clock, counters, _guard_limits(settings))
        service = WorkerService(
            WorkerParts(
                role=settings.role,
                model=model,
                engine=engine,
                hub=hub,
                admission=admission,
                registration=registration,
                costs=costs,
                prefill=PrefillLeg(engine, costs, counters),
                decode=DecodeLeg(engine, hub, committer, counters),
                prepared_prefill=prepared_prefill,
                prepared_decode=prepared_decode,
                record=record,
            )
        )

        engine_watch: asyncio.Task[NoReturn] | None = None

        async def hand_over() -> None:
            # The KV of prompts whose legs have only just ended is still in this engine.
            lives = engine_watch is not None and not engine_watch.done()
            if settings.role == "prefill" and admission.drained_busy and lives:
                await clock.sleep(settings.drain_seconds)

        stack.push_async_callback(hand_over)
        leaving = rpc_server.Drain(settings.drain_seconds)
        port = await stack.enter_async_context(
            rpc_server.serve(
                settings.listen,
                lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server),
                [worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]],
                grace_seconds=settings.grace_seconds,
                tls=tls,
                registry=counters.registry,
                drain=leaving,
                around=spans(tracing, _SPANS),
                ready=False,
            )
        )
        address = settings.advertise or join_host_port(host, port)

        async def drain() -> None:
            admission.drain()
            prepared_prefill.drain()
            prepared_decode.drain()
            await registration.drain()

        async def ready_once_heard_of() -> None:
            await registration.heard_of()
            leaving.health.set_ready(True)

        stack.push_async_callback(drain)
        tasks.start(registration.run(), name="registration")
        tasks.start(ready_once_heard_of(), name="readiness")
        if settings.role == "decode":
            feed = releases or GrpcReleaseFeed(channel)
            follower = ReleaseFollower(feed, hub, clock, settings.worker_id)
            tasks.start(follower.run(), name="releases")
            pin_ledger = pin_ledger or GrpcPinLedger(channel, settings.worker_id)
            look_after_pins(settings, tasks, hub, pin_ledger, engine, admission, clock, counters)
        engine_watch = tasks.start(
            watch_process(process)
            if process is not None
            else watch_health(engine, clock, poll_seconds=settings.engine_poll_seconds),
            name="engine-watch",
        )
        reload = partial(reload_all, tls, kvmeta_tls)
        yield Worker(port, address, admission, registration, counters, reload)


def _guard_limits(settings: WorkerSettings) -> GuardLimits:
    """When links are probed, by the settings."""
    return GuardLimits(
        enabled=settings.pull_guard,
        probe_tokens=settings.pull_probe_tokens,
        probe_turns=settings.pull_probe_turns,
        probe_seconds=settings.pull_probe_seconds,
        probe_overdue_seconds=settings.pull_probe_overdue_seconds,
    )


def _require_reachable(settings: WorkerSettings, side_channel_host: str) -> None:
    check_reachable(settings.advertise or settings.listen, side_channel_host)


def _require_free(address: str) -> None:
    """Fail now if the address is taken, and not after the model is loaded.

    Raises:
        OSError: the address cannot be bound.
    """
    host, port = split_host_port(address)
    try:
        family, kind, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(resolved)
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
