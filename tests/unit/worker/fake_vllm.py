"""A fake vLLM: its HTTP surface over a real socket, with scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

BREAK = object()
"""A step of a streamed answer: cut the connection."""


@dataclass
class Arriving:
    """A request of which the fake has got the headers, and perhaps more."""

    headers: Mapping[str, str]
    transport: asyncio.Transport | None
    raw: bytes = b""

    def cut(self) -> None:
        """Cut its connection."""
        assert self.transport is not None
        self.transport.abort()


@dataclass
class Received:
    """A request that the fake has got."""

    path: str
    raw: bytes
    connection: object
    """Identity of the TCP connection it came on."""
    headers: Mapping[str, str] = field(default_factory=dict)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> dict[str, Any]:
        decoded: dict[str, Any] = msgspec.json.decode(self.raw)
        return decoded


@dataclass
class Answer:
    """What to answer: one body, or steps of an event stream."""

    status: int = 200
    body: bytes = b"{}"
    steps: Sequence[bytes | asyncio.Event | object] | None = None
    hold: asyncio.Event | None = None
    """Answer only when this is set."""


def sse(*payloads: bytes, done: bool = True) -> list[bytes]:
    """Steps of a stream in vLLM's format, one event each."""
    return [b"data: " + payload + b"\n\n" for payload in (*payloads, *([b"[DONE]"] * done))]


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    """A chat chunk as vLLM writes it."""
    return msgspec.json.encode(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "model": "tiny",
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": text},
                    "logprobs": None,
                    "finish_reason": finish_reason,
                }
            ],
        }
    )


def usage_chunk(prompt: int = 5, completion: int = 2) -> bytes:
    """The chunk with which vLLM reports usage at the end of a stream."""
    return msgspec.json.encode(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "model": "tiny",
            "choices": [],
            "usage": {
                "prompt_tokens": prompt,
                "total_tokens": prompt + completion,
                "completion_tokens": completion,
            },
        }
    )


def error_body(
    message: str, code: int, kind: str = "BadRequestError", param: object = None
) -> bytes:
    """An error as vLLM writes it."""
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}
    )


METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.5
"""

MODELS = msgspec.json.encode(
    {
        "object": "list",
        "data": [
            {"id": "tiny", "object": "model", "max_model_len": 4096, "parent": None},
            {"id": "tiny-lora", "object": "model", "max_model_len": 4096, "parent": "tiny"},
        ],
    }
)


class FakeVllm:
    """Answers by path. Made by `fake_vllm`."""

    def __init__(self) -> None:
        self.url = ""
        self.received: list[Received] = []
        self.arriving: list[Arriving] = []
        """Requests that are not whole yet."""
        self.open = 0
        """Requests that are not answered yet."""
        self.early: dict[str, Answer] = {}
        """Answers to requests that are not whole yet, by path."""
        self.healthy = True
        self.answers: dict[str, Answer] = {
            "/v1/models": Answer(body=MODELS),
            "/metrics": Answer(body=METRICS),
            "/tokenize": Answer(body=b'{"count":7,"max_model_len":4096,"tokens":[1]}'),
        }

    def requests(self, path: str) -> list[Received]:
        """What came for a path."""
        return [received for received in self.received if received.path == path]

    def cut_all(self) -> None:
        """Cut the connections of all requests that have come whole."""
        for received in self.received:
            if isinstance(received.connection, asyncio.Transport):
                received.connection.abort()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.open += 1
        try:
            return await self._handle(request)
        finally:
            self.open -= 1

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        early = self.early.get(request.path)
        if early is not None:
            await request.content.readany()
            return await self._answer(request, early)
        arriving = Arriving(dict(request.headers), request.transport)
        self.arriving.append(arriving)
        try:
            async for piece in request.content.iter_any():
                arriving.raw += piece
        finally:
            self.arriving.remove(arriving)
        received = Received(request.path, arriving.raw, request.transport, arriving.headers)
        self.received.append(received)
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        answer = self.answers.get(request.path)
        if answer is None:
            return web.Response(status=404, body=b'{"detail":"Not Found"}')
        try:
            return await self._answer(request, answer)
        except (asyncio.CancelledError, ConnectionError):
            received.disconnected.set()
            raise

    async def _answer(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        if answer.hold is not None:
            await answer.hold.wait()
        if answer.steps is None:
            return web.Response(
                status=answer.status, body=answer.body, content_type="application/json"
            )
        return await self._stream(request, answer.steps)

    async def _stream(self, request: web.Request, steps: Sequence[object]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for step in steps:
            if isinstance(step, bytes):
                await response.write(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif step is BREAK and request.transport is not None:
                request.transport.abort()
                return response
        await response.write_eof()
        return response


@asynccontextmanager
async def fake_vllm(port: int = 0) -> AsyncIterator[FakeVllm]:
    """A fake engine on a port of the loopback interface; 0 takes a free one."""
    fake = FakeVllm()
    application = web.Application(client_max_size=64 * 1024 * 1024)
    application.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(
        application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, bound = runner.addresses[0][:2]
        fake.url = f"http://{host}:{bound}"
        yield fake
    finally:
        await runner.cleanup()
