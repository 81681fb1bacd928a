"""A router that is asked to stop says so, and serves until others know."""

from __future__ import annotations

import asyncio

import aiohttp
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop import rpc
from kvloop.router.v1 import router_pb2_grpc
from services.common.rpc_server import Drain
from tests.flow.router.stack import Stack, chat_request, running


async def test_it_says_not_ready_and_answers_turns_until_load_balancers_have_turned_away() -> None:
    draining, noticed, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    started: asyncio.Future[Stack] = asyncio.get_running_loop().create_future()

    async def until_noticed(seconds: float) -> None:
        assert seconds == 5
        draining.set()
        await noticed.wait()

    async def life() -> None:
        drain = Drain(5, sleep=until_noticed)
        async with running(settings={"gateway_listen": "127.0.0.1:0"}, drain=drain) as stack:
            started.set_result(stack)
            await stop.wait()

    async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession() as http:
        living = tasks.create_task(life())
        router = (await started).router
        ready = f"http://127.0.0.1:{router.gateway_port}/health/ready"
        async with rpc.open_channel(f"127.0.0.1:{router.port}") as channel:
            async with http.get(ready) as reply:
                assert reply.status == 200

            stop.set()
            await draining.wait()

            async with http.get(ready) as reply:
                assert reply.status == 503
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            stub = router_pb2_grpc.RouterServiceStub(channel)
            events = [event async for event in stub.Chat(chat_request())]
            assert events[-1].HasField("result")

            noticed.set()
            await living
