"""What a router says of itself: that it takes calls, and that it can serve turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc_server import Drain
from tests.flow.router.fakes import KeptHealth, make_worker
from tests.flow.router.stack import DECODE, PREFILL, Stack, running

_SERVICE = "kvloop.router.v1.RouterService"
_SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class _Watcher:
    """Sees the router as balancers and orchestrators do."""

    stack: Stack
    http: aiohttp.ClientSession
    watch: AsyncIterator[health_pb2.HealthCheckResponse]

    async def next_ready(self) -> bool:
        """The next thing that a watcher of gRPC health hears; HTTP says the same."""
        async with asyncio.timeout(20):
            ready = (await anext(self.watch)).status == _SERVING
        url = f"http://127.0.0.1:{self.stack.router.gateway_port}/health/ready"
        async with self.http.get(url) as reply:
            assert reply.status == (200 if ready else 503)
        return ready

    async def takes_calls(self) -> bool:
        """Health of the server as a whole."""
        stub: Any = health_pb2_grpc.HealthStub(self.stack.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        return bool(answer.status == _SERVING)


@asynccontextmanager
async def _watched(**options: Any) -> AsyncIterator[_Watcher]:
    settings = {"gateway_listen": "127.0.0.1:0", "worker_grace_seconds": 0.2}
    async with running(settings=settings, **options) as stack, aiohttp.ClientSession() as http:
        stub: Any = health_pb2_grpc.HealthStub(stack.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=_SERVICE))
        yield _Watcher(stack, http, aiter(watch))
        watch.cancel()


async def test_a_router_is_ready_while_it_knows_a_decode_worker() -> None:
    async with _watched(decode=[]) as router:
        assert not await router.next_ready()
        assert await router.takes_calls()
        worker = make_worker("d0", DECODE)
        router.stack.registry.add(worker)
        assert await router.next_ready()
        draining = make_worker("d0", DECODE)
        draining.state = draining.STATE_DRAINING
        router.stack.registry.add(draining)
        assert not await router.next_ready()
        router.stack.registry.add(worker)
        assert await router.next_ready()
        router.stack.registry.remove("d0")
        assert not await router.next_ready()
        assert await router.takes_calls()


async def test_a_router_that_knows_the_workers_is_ready_from_the_start() -> None:
    drain = Drain()
    drain.health = kept = KeptHealth()
    async with _watched(drain=drain) as router:
        assert await router.next_ready()
    assert kept.said
    assert all(kept.said)


async def test_a_worker_that_a_new_registry_does_not_know_is_missed_though_no_turn_comes() -> None:
    async with _watched(clock=time.monotonic) as router:
        assert await router.next_ready()
        router.stack.registry.workers = {"p0": make_worker("p0", PREFILL)}
        router.stack.registry.hang_up()
        assert not await router.next_ready()
