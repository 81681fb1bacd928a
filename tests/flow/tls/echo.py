"""A server that says who calls it, and a stream that goes on until it is told to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.common import rpc_server
from services.common.tls import ServerTls
from services.common.tls_clients import client_names

WHO = "/test.Echo/Who"
TICK = "/test.Echo/Tick"


@dataclass
class Echo(grpc.GenericRpcHandler):
    """Answers WHO with the names in the caller's certificate, and TICK on every `tick`."""

    ticks: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    port: int = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method."""
        if handler_call_details.method == WHO:
            return grpc.unary_unary_rpc_method_handler(self._who)
        return grpc.unary_stream_rpc_method_handler(self._tick)

    async def _who(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return ",".join(sorted(client_names(context.auth_context()))).encode()

    async def _tick(
        self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        while (tick := await self.ticks.get()) != b"end":
            yield tick


@asynccontextmanager
async def serve(tls: ServerTls | None, address: str = "127.0.0.1:0") -> AsyncIterator[Echo]:
    """Run one."""
    echo = Echo()
    async with rpc_server.serve(
        address,
        lambda server: server.add_generic_rpc_handlers((echo,)),
        [],
        grace_seconds=0,
        tls=tls,
    ) as port:
        echo.port = port
        yield echo


async def who(channel: grpc.aio.Channel) -> str:
    """What the server says to WHO."""
    call: Any = channel.unary_unary(WHO)
    reply: bytes = await call(b"", timeout=20)
    return reply.decode()
