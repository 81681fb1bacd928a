"""Clients that cost little: they time what arrives and look at nothing else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import grpc
import msgspec

from bench.relay.prompts import Prompt
from kvloop import rpc

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_PARAMS = b'"kv_transfer_params":'
_FIRST_LEG = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Timing:
    """When the parts of one answer came, in seconds of the clock."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    """When data of the answer's body came; what came together counts once."""
    ended: float = 0.0

    @property
    def ttft(self) -> float:
        """Start to the first data."""
        return self.arrivals[0] - self.started


class Way(Protocol):
    """A way for a request to its engines, on one lane: one request at a time."""

    async def run(self, prompt: Prompt) -> Timing:
        """Send a request and read its whole answer."""
        ...


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, kept."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._done: asyncio.Future[bytes] | None = None
        self._received: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has its own class

    async def post(self, path: str, body: bytes, timing: Timing) -> bytes:
        """Send a request; the body of its reply, chunked or not."""
        self._timing, self._received, self._head = timing, [], b""
        self._left = -1
        self._done = asyncio.get_running_loop().create_future()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._transport.writelines([head.encode(), body])
        return await self._done

    def data_received(self, data: bytes) -> None:
        if not self._received:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            if b" 200 " not in head[:20]:
                self._fail(f"{head[:200]!r} {data[:500]!r}")
                return
            found = _LENGTH.search(head)
            self._left = int(found[1]) if found else -1
            if not data:
                self._head = head + end
                return
        self._timing.arrivals.append(self._clock())
        self._received.append(data)
        if self._left >= 0:
            self._left -= len(data)
            ended = self._left == 0
        else:
            ended = data.endswith(b"0\r\n\r\n")
        if ended and self._done is not None:
            self._done.set_result(b"".join(self._received))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection broke: {exc}")

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def _fail(self, text: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(text))


async def connect(port: int, clock: Callable[[], float]) -> Connection:
    """A connection to a server on this machine."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(clock), "127.0.0.1", port)
    return connection


class HttpWay:
    """Through one HTTP server: a router, or an engine alone."""

    def __init__(self, connection: Connection, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._clock = clock

    async def run(self, prompt: Prompt) -> Timing:
        """See Way."""
        body = prompt.body()
        timing = Timing(self._clock())
        await self._connection.post(prompt.path, body, timing)
        timing.ended = self._clock()
        return timing


class BareWay:
    """Both legs straight to the engines, as the bare protocol has them."""

    def __init__(self, prefill: Connection, decode: Connection, clock: Callable[[], float]) -> None:
        self._prefill = prefill
        self._decode = decode
        self._clock = clock

    async def run(self, prompt: Prompt) -> Timing:
        """See Way."""
        body = prompt.body()
        timing = Timing(self._clock())
        params = msgspec.json.encode(_FIRST_LEG)
        reply = await self._prefill.post(
            prompt.path, b"%s,%s%s}" % (body[:-1], _PARAMS, params), Timing(0.0)
        )
        params = reply[reply.rindex(_PARAMS) + len(_PARAMS) : -1]
        await self._decode.post(prompt.path, b"%s,%s%s}" % (body[:-1], _PARAMS, params), timing)
        timing.ended = self._clock()
        return timing


class GrpcWay:
    """Through the router's gRPC front."""

    def __init__(self, channel: grpc.aio.Channel, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._clock = clock

    async def run(self, prompt: Prompt) -> Timing:
        """See Way. Messages are not parsed."""
        method, request = prompt.message()
        call: Any = self._channel.unary_stream(f"/kvloop.router.v1.RouterService/{method}")
        timing = Timing(self._clock())
        async for _ in call(request):
            timing.arrivals.append(self._clock())
        timing.ended = self._clock()
        return timing


class LegsWay:
    """Both legs straight to sidecars, over gRPC. Messages are not parsed."""

    def __init__(self, channel: grpc.aio.Channel, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._clock = clock

    async def run(self, prompt: Prompt) -> Timing:
        """See Way."""
        service = "/kvloop.worker.v1.WorkerService"
        request = prompt.leg()
        timing = Timing(self._clock())
        prefill: Any = self._channel.unary_unary(f"{service}/Prefill")
        await prefill(request)
        decode: Any = self._channel.unary_stream(f"{service}/Decode")
        async for _ in decode(request):
            timing.arrivals.append(self._clock())
        timing.ended = self._clock()
        return timing


def open_channel(port: int) -> grpc.aio.Channel:
    """A channel to a server on this machine."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.OPTIONS)
