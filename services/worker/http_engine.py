"""vLLM over its own HTTP server."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from services.common import tracing
from services.worker.begun_request import HttpBegunRequest
from services.worker.engine import Api, EngineGauges, EngineModel, TokenCount
from services.worker.engine_front import HEAD_HEADER
from services.worker.http_replies import (
    ENGINE_ANSWERED,
    ENGINE_ASKED,
    read,
    streamed,
    typed_errors,
)

_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_STREAMED_BODY_BYTES = 512 * 1024
KEEP_ALIVE_SECONDS = 2.0
"""How long idle connections are kept by default. Shorter than vLLM's own 5 s, so that
a request never goes out on a connection that the engine is closing."""

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_SAMPLE = re.compile(rf"^({_RUNNING}|{_WAITING}|{_KV_USAGE})(?:\{{[^}}]*\}})? (\S+)", re.MULTILINE)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokenized(msgspec.Struct):
    count: int
    max_model_len: int


class HttpEngine:
    """Implements the Engine port. Use `open_engine` to make one.

    Args:
        session: used for all requests; not closed here.
        url: the engine's base URL, without a path.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    async def complete(self, api: Api, body: bytes) -> bytes:
        """Send a request and return the whole reply."""
        span = tracing.current()
        span.event(ENGINE_ASKED)
        with typed_errors(self._url):
            async with self._session.post(
                self._url + api, data=_payload(body), headers=_headers(api, body, span.headers())
            ) as reply:
                answer = await read(reply)
        span.event(ENGINE_ANSWERED)
        return answer

    @asynccontextmanager
    async def stream(self, api: Api, body: bytes) -> AsyncIterator[AsyncIterator[Sequence[bytes]]]:
        """Send a request and receive its events as they come."""
        span = tracing.current()
        span.event(ENGINE_ASKED)
        with typed_errors(self._url):
            reply = await self._session.post(
                self._url + api, data=_payload(body), headers=_headers(api, body, span.headers())
            )
        async with streamed(reply, api, self._url) as events:
            yield events

    def begin(self, api: Api, head: bytes, headers: Mapping[str, str]) -> HttpBegunRequest:
        """Begin a request whose body is not all there yet."""
        all_headers = {HEAD_HEADER: str(len(head)), **headers}
        return HttpBegunRequest(self._session, self._url, api, head, all_headers)

    async def models(self) -> Sequence[EngineModel]:
        """Base models served."""
        found = msgspec.json.decode(await self._get("/v1/models"), type=_Models)
        return [
            EngineModel(model.id, model.max_model_len or 0)
            for model in found.data
            if model.parent is None
        ]

    async def tokenize(self, body: bytes) -> TokenCount:
        """Count the tokens of a body in the format of /tokenize."""
        with typed_errors(self._url):
            async with self._session.post(self._url + "/tokenize", data=_payload(body)) as reply:
                found = msgspec.json.decode(await read(reply), type=_Tokenized)
        return TokenCount(found.count, found.max_model_len)

    async def gauges(self) -> EngineGauges:
        """Read the engine's load from its Prometheus metrics."""
        return read_gauges((await self._get("/metrics")).decode(errors="replace"))

    async def healthy(self) -> bool:
        """True if /health answers 200."""
        try:
            async with self._session.get(
                self._url + "/health", timeout=aiohttp.ClientTimeout(total=5)
            ) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _get(self, path: str) -> bytes:
        with typed_errors(self._url):
            async with self._session.get(
                self._url + path, timeout=aiohttp.ClientTimeout(total=10)
            ) as reply:
                return await read(reply)


def _headers(api: Api, body: bytes, traced: Mapping[str, str]) -> Mapping[str, str]:
    """Headers of a request that goes in one piece."""
    return traced if api is Api.TOKENIZE else {HEAD_HEADER: str(len(body) - 1), **traced}


def _payload(body: bytes) -> bytes | io.BytesIO:
    """The body in the form in which aiohttp sends it best: large ones in pieces."""
    return body if len(body) < _STREAMED_BODY_BYTES else io.BytesIO(body)


def read_gauges(metrics: str) -> EngineGauges:
    """The engine's load out of the text of its /metrics.

    With several engine processes behind one server, requests add up and the
    fullest KV cache counts.
    """
    running = waiting = usage = 0.0
    for name, value in _SAMPLE.findall(metrics):
        if name == _RUNNING:
            running += float(value)
        elif name == _WAITING:
            waiting += float(value)
        else:
            usage = max(usage, float(value))
    return EngineGauges(int(running), int(waiting), usage)


@asynccontextmanager
async def open_engine(
    url: str,
    *,
    max_connections: int,
    connect_timeout_seconds: float,
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
) -> AsyncIterator[HttpEngine]:
    """An engine with one connection pool, closed on exit.

    Args:
        url: base URL, such as http://127.0.0.1:8100.
        max_connections: requests in flight at most; more wait for a connection.
        connect_timeout_seconds: after that the engine counts as unreachable.
            Nothing else is timed: a request may take as long as its caller
            lets it.
        keep_alive_seconds: how long idle connections are kept; shorter than the
            engine keeps them.
    """
    connector = aiohttp.TCPConnector(
        limit=max_connections, keepalive_timeout=keep_alive_seconds, ttl_dns_cache=10
    )
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_seconds)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=_HEADERS
    ) as session:
        yield HttpEngine(session, url)
