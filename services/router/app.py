"""Builds a router from its settings: the only place that knows every part."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from limits import parse_many
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from kvloop.router.v1 import router_pb2, router_pb2_grpc
from services.common import metrics_http, metrics_shares, rpc_server
from services.common.backoff import Backoff
from services.common.process import reload_all
from services.common.replicated_channel import open_replicated_channel
from services.router.admission import AdmissionLimits, TurnAdmission
from services.router.breaker import BreakerLimits
from services.router.deadline import Clock
from services.router.decode_leg import DecodeLeg
from services.router.explain import Explainer
from services.router.gateway import server as gateway
from services.router.gateway.conversations import ConversationPages
from services.router.gateway.http import BodyLimits
from services.router.gateway.pages import Pages
from services.router.gateway.requests import ReadingRules
from services.router.gateway.turns import TurnEndpoint
from services.router.handles import HandleDesk
from services.router.keys import Authenticator, KeyFile, OpenDoor, key_lines, parse_keys
from services.router.ledger import GrpcLedger, Ledger
from services.router.length import LengthCheck
from services.router.metrics import RouterMetrics
from services.router.patience import Patience
from services.router.policies import POLICIES, PolicyName
from services.router.policy import Rng
from services.router.prefill_leg import PrefillLeg
from services.router.preparation import BodiesAhead
from services.router.readiness import tell_readiness
from services.router.reception import Reception
from services.router.registry import GrpcRegistry, Registry, RegistryFollower
from services.router.reuse_watch import ReuseWatch
from services.router.routing import Routes
from services.router.service import RouterService
from services.router.settings import RouterSettings
from services.router.status.feed import StatusFeed
from services.router.status.fleet import Fleet, GrpcFleet
from services.router.status.journal import TurnJournal
from services.router.status.pages import StatusPages
from services.router.turn import TurnPipeline
from services.router.turn_ends import TurnEnds
from services.router.workers import Connect, WorkerPool, connect_over_grpc


@dataclass(frozen=True)
class Place:
    """What one of several router processes knows of them."""

    number: int
    """Of this process, from 0."""
    metrics_folder: Path
    """Where each shows its metrics to the others."""


@dataclass(frozen=True)
class Router:
    """A router that serves."""

    port: int
    """Port of the gRPC server."""
    gateway_port: int | None
    """Port of the OpenAI-compatible HTTP server, if there is one."""
    metrics_port: int | None
    """Port of the Prometheus endpoint, if there is one."""
    metrics: RouterMetrics
    """Its counters."""
    pool: WorkerPool
    """The workers it knows."""
    follower: RegistryFollower
    """What keeps them up to date."""
    admission: TurnAdmission
    """Which turns run and which wait."""
    reload: Callable[[], None]
    """Reads the files again that may be replaced while it serves."""


@asynccontextmanager
async def build(
    settings: RouterSettings,
    *,
    clock: Clock = time.monotonic,
    wall_clock: Clock = time.time,
    rng: Rng = random.random,
    ledger: Ledger | None = None,
    registry: Registry | None = None,
    connect: Connect | None = None,
    fleet: Fleet | None = None,
    drain: rpc_server.Drain | None = None,
    place: Place | None = None,
) -> AsyncIterator[Router]:
    """Serve turns while the block runs.

    At the end health says so for `drain_seconds`, then new turns are refused and
    those in flight get `shutdown_grace_seconds`, then unused handles go back and
    channels close.

    Args:
        settings: the router's settings.
        clock: seconds on a clock that never goes back.
        wall_clock: seconds since the epoch.
        rng: random numbers in [0, 1), to break ties between workers.
        ledger: the conversation ledger; kvmeta's if omitted.
        registry: the worker registry; kvmeta's if omitted.
        connect: opens a channel to a worker; over gRPC if omitted.
        fleet: what the status page shows of kvmeta; kvmeta's own if omitted.
        drain: how it leaves; as the settings say if omitted.
        place: among the processes that share its ports; None: it is alone.

    Raises:
        OSError: an address cannot be bound, or a file cannot be read.
        BadKeysError: the file of API keys is not well formed.
    """
    authenticator = _authenticator(settings, clock)
    tls = settings.server_tls(clock=clock)
    kvmeta_tls = settings.peer_tls(settings.peer_tls_kvmeta_name, clock=clock)
    worker_tls = settings.peer_tls(settings.peer_tls_worker_name, clock=clock)
    metrics = RouterMetrics(CollectorRegistry())
    async with AsyncExitStack() as stack:
        tracing = await stack.enter_async_context(settings.open_tracing("kvloop-router"))
        kvmeta = await stack.enter_async_context(
            open_replicated_channel(settings.kvmeta, kvmeta_tls)
        )
        if ledger is None:
            ledger = stack.enter_context(closing(GrpcLedger(kvmeta)))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())

        workers_changed = asyncio.Event()
        pool = WorkerPool(
            tasks,
            clock=clock,
            breakers=_breaker_limits(settings),
            grace_seconds=settings.worker_grace_seconds,
            connect=connect or connect_over_grpc(worker_tls),
            breaker_opened=metrics.breaker_opened,
            changed=workers_changed.set,
        )
        stack.push_async_callback(pool.aclose)
        metrics.watch_channels(lambda: pool.channels)
        metrics.watch_breakers(pool.breakers)
        routes = Routes(pool, POLICIES[PolicyName(settings.policy)], clock=clock, rng=rng)
        follower = RegistryFollower(
            registry or GrpcRegistry(kvmeta),
            pool,
            backoff=Backoff(
                settings.registry_retry_seconds, settings.registry_retry_max_seconds, rng=rng
            ),
        )
        following = tasks.create_task(follower.run(), name="follow registry")
        stack.callback(following.cancel)

        journal = TurnJournal(wall_clock)
        reuse = ReuseWatch()
        metrics.watch_reuse(lambda: reuse.degraded)
        ends = TurnEnds(metrics, journal, reuse, clock=clock, wall_clock=wall_clock)
        pipeline = _pipeline(settings, pool, routes, ledger, metrics, ends, tasks, clock=clock)
        admission = TurnAdmission(_admission_limits(settings))
        metrics.watch_queue(lambda: admission.running, lambda: admission.waiting)
        reception = Reception(
            authenticator=authenticator,
            admission=admission,
            pipeline=pipeline,
            metrics=metrics,
            clock=clock,
            max_turn_seconds=settings.max_turn_seconds,
            deadline_margin_seconds=settings.deadline_margin_seconds,
            tracing=tracing,
        )
        ledger_timeout = settings.ledger_call_timeout_seconds
        service = RouterService(
            reception=reception,
            explainer=Explainer(
                pool,
                ledger,
                routes,
                timeout_seconds=ledger_timeout,
                estimate_timeout_seconds=settings.estimate_timeout_seconds,
            ),
            pool=pool,
            ledger=ledger,
            ledger_timeout_seconds=ledger_timeout,
        )
        metrics_port = (
            stack.enter_context(metrics_http.expose(metrics.registry, settings.metrics_listen))
            if settings.metrics_listen is not None
            else None
        )
        shown = metrics.registry
        if place is not None:
            metrics_http.add_process(metrics.registry)
            stack.enter_context(
                metrics_shares.share(metrics.registry, place.metrics_folder, place.number)
            )
            shown = metrics_shares.of_all(place.metrics_folder)
        leaving = drain or rpc_server.Drain(settings.drain_seconds)
        # Who is sent a turn as soon as he listens should know the workers by then.
        await follower.synced_once(settings.registry_wait_seconds)
        port = await stack.enter_async_context(
            rpc_server.serve(
                settings.listen,
                lambda server: router_pb2_grpc.add_RouterServiceServicer_to_server(service, server),
                [router_pb2.DESCRIPTOR.services_by_name["RouterService"]],
                grace_seconds=settings.shutdown_grace_seconds,
                tls=tls,
                registry=metrics.registry,
                drain=leaving,
                share_port=place is not None,
                ready=pool.can_serve,
            )
        )
        telling = tasks.create_task(
            tell_readiness(pool, workers_changed, leaving.health), name="tell readiness"
        )
        stack.callback(telling.cancel)
        gateway_port = None
        if settings.gateway_listen:
            pages = Pages(
                reception=reception,
                pool=pool,
                routes=routes,
                registry=shown,
                ready=lambda: pool.can_serve and not leaving.started,
                started_at=int(wall_clock()),
                body_limits=_body_limits(settings),
                connect_timeout_seconds=settings.connect_timeout_seconds,
                timeout_seconds=settings.length_check_timeout_seconds,
            )
            feed = StatusFeed(
                fleet or GrpcFleet(kvmeta, timeout_seconds=ledger_timeout),
                journal,
                pool.all,
                interval_seconds=settings.status_interval_seconds,
                leaving=lambda: leaving.started,
            )
            gateway_port = await stack.enter_async_context(
                gateway.serve(
                    _gateway_app(
                        settings,
                        reception,
                        pages,
                        ConversationPages(reception, pool, ledger, timeout_seconds=ledger_timeout),
                        StatusPages(
                            reception.caller, feed, max_viewers=settings.status_max_viewers
                        ),
                    ),
                    settings.gateway_listen,
                    tasks,
                    grace_seconds=settings.shutdown_grace_seconds,
                    head_timeout_seconds=settings.head_timeout_seconds,
                    tls=tls,
                    share_port=place is not None,
                )
            )
            stack.push_async_callback(leaving.run)
        reload = partial(reload_all, authenticator, tls, kvmeta_tls, worker_tls)
        yield Router(port, gateway_port, metrics_port, metrics, pool, follower, admission, reload)


def _authenticator(settings: RouterSettings, clock: Clock) -> Authenticator:
    ring = parse_keys(key_lines(settings.api_keys))
    if settings.api_keys_file is None and not ring.entries:
        return OpenDoor()
    return KeyFile(settings.api_keys_file, ring, isolated=settings.isolate_tenants, clock=clock)


def _breaker_limits(settings: RouterSettings) -> BreakerLimits:
    return BreakerLimits(
        failures=settings.worker_failures,
        cooldown_seconds=settings.worker_cooldown_seconds,
        max_cooldown_seconds=settings.worker_cooldown_max_seconds,
    )


def _admission_limits(settings: RouterSettings) -> AdmissionLimits:
    return AdmissionLimits(
        running=settings.max_running_turns,
        waiting=settings.max_waiting_turns,
        wait_seconds=settings.max_wait_seconds,
        rates=tuple(parse_many(settings.rate_limit)) if settings.rate_limit else (),
    )


def _body_limits(settings: RouterSettings) -> BodyLimits:
    return BodyLimits(
        max_bytes=settings.max_body_bytes,
        seconds=settings.body_timeout_seconds,
        bytes_per_second=settings.body_bytes_per_second,
    )


def _gateway_app(
    settings: RouterSettings,
    reception: Reception,
    pages: Pages,
    conversations: ConversationPages,
    status: StatusPages,
) -> ASGIApp:
    rules = ReadingRules(
        derive_conversations=settings.derive_conversations,
        tell_cached_tokens=settings.tell_cached_tokens,
    )
    turns = {
        path: TurnEndpoint(api, reception, rules, body_limits=_body_limits(settings))
        for path, api in gateway.TURN_PATHS.items()
    }
    more = [*conversations.routes(), *(status.routes() if settings.status_page else ())]
    return gateway.build_app(turns, pages, more)


def _pipeline(
    settings: RouterSettings,
    pool: WorkerPool,
    routes: Routes,
    ledger: Ledger,
    metrics: RouterMetrics,
    ends: TurnEnds,
    tasks: asyncio.TaskGroup,
    *,
    clock: Clock,
) -> TurnPipeline:
    handles = HandleDesk(
        ledger,
        metrics,
        tasks,
        patience_seconds=settings.ledger_timeout_seconds,
        call_timeout_seconds=settings.ledger_call_timeout_seconds,
    )
    patience = Patience(
        prefill_seconds=settings.prefill_timeout_seconds,
        first_chunk_seconds=settings.first_chunk_timeout_seconds,
        next_chunk_seconds=settings.next_chunk_timeout_seconds,
        prompt_bytes_per_second=settings.prompt_bytes_per_second,
    )
    ahead = BodiesAhead(pool, least_bytes=settings.ahead_bytes)
    return TurnPipeline(
        pool=pool,
        routes=routes,
        handles=handles,
        length=LengthCheck(
            pool,
            routes,
            metrics,
            bytes_per_token=settings.length_check_bytes_per_token,
            timeout_seconds=settings.length_check_timeout_seconds,
        ),
        prefill=PrefillLeg(
            pool,
            routes,
            handles,
            metrics,
            connect_timeout_seconds=settings.connect_timeout_seconds,
            patience=patience,
            ahead=ahead,
        ),
        decode=DecodeLeg(
            pool,
            routes,
            metrics,
            connect_timeout_seconds=settings.connect_timeout_seconds,
            patience=patience,
            ahead=ahead,
        ),
        ends=ends,
        clock=clock,
    )
