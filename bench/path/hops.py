"""What one hop between two processes costs: back to back, and after idle time.

An idle process has to be woken up. Over gRPC three threads wake one another at either
end, over a plain connection one.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from kvloop.rpc import make_aio_channel

_METHOD = "/bench.Path/Hop"
_REPLY = b"y" * 300
_LENGTH_BYTES = 4
_OPTIONS = (("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),)
"""As kvloop's own servers have it."""

Hop = Callable[[int], Awaitable[None]]
"""Sends so many bytes and waits for the first of the reply."""


async def measure(
    hop: Hop, size: int, pause_seconds: float, clock: Callable[[], float], count: int
) -> float:
    """Median seconds of one hop.

    Args:
        hop: takes it.
        size: bytes sent.
        pause_seconds: idle time before each.
        clock: monotonic seconds.
        count: how many are measured.
    """
    taken = []
    for number in range(count + 5):
        await asyncio.sleep(pause_seconds)
        started = clock()
        await hop(size)
        if number >= 5:  # the first ones open connections
            taken.append(clock() - started)
    return statistics.median(taken)


@asynccontextmanager
async def grpc_hop() -> AsyncIterator[Hop]:
    """A hop to another process with kvloop's own options, as from router to sidecar."""
    async with _server("grpc") as port:
        channel = make_aio_channel(f"127.0.0.1:{port}", None)
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(_METHOD)

        async def hop(size: int) -> None:
            answer = call(bytes(size))
            async for _ in answer:
                pass

        try:
            yield hop
        finally:
            await channel.close()


@asynccontextmanager
async def tcp_hop() -> AsyncIterator[Hop]:
    """A hop over a plain connection, the least that any protocol takes."""
    async with _server("tcp") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def hop(size: int) -> None:
            writer.write(size.to_bytes(_LENGTH_BYTES, "big") + bytes(size))
            await reader.readexactly(len(_REPLY))

        try:
            yield hop
        finally:
            writer.close()


@asynccontextmanager
async def _server(kind: str) -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.path.hops", kind, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


async def _serve_grpc() -> None:
    async def answer(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield _REPLY

    server = grpc.aio.server(options=_OPTIONS)
    service, _, method = _METHOD.strip("/").partition("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


async def _serve_tcp() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while size := await reader.read(_LENGTH_BYTES):
            await reader.readexactly(int.from_bytes(size, "big"))
            writer.write(_REPLY)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve_grpc() if sys.argv[1] == "grpc" else _serve_tcp())
