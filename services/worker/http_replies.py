"""What an engine answers over HTTP: whole replies, streams, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager

import aiohttp

from services.common import tracing
from services.worker import engine_errors
from services.worker.engine import DONE, Api
from services.worker.sse import SseParser

ENGINE_ASKED = "engine_asked"
"""Event of a leg's span: the request, or the rest of it, is about to be written."""
ENGINE_ANSWERED = "engine_answered"
"""Event of a leg's span: the reply, or the first event of a stream, is read."""

_DRAIN_SECONDS = 0.5
"""How long the end of the HTTP body may follow `[DONE]`; the connection is kept
for the next request only if it is seen."""


@contextmanager
def typed_errors(url: str) -> Iterator[None]:
    """Raise what goes wrong with a connection to the engine as errors of its port."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise engine_errors.unreachable(url, error) from error
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise engine_errors.lost(url, f"{type(error).__name__}: {error}") from error


async def read(reply: aiohttp.ClientResponse) -> bytes:
    """The body of a reply, or the error that it is. aiohttp's own errors come as such."""
    body = await reply.read()
    if reply.status >= 400:
        raise engine_errors.from_reply(reply.status, body)
    return body


@asynccontextmanager
async def streamed(
    reply: aiohttp.ClientResponse, api: Api, url: str
) -> AsyncIterator[AsyncIterator[Sequence[bytes]]]:
    """The events of a reply, as `Engine.stream` gives them. Closes it in the end."""
    try:
        if reply.status >= 400:
            with typed_errors(url):
                raise engine_errors.from_reply(reply.status, await reply.read())
        async with aclosing(_events(reply, api, url)) as events:
            yield events
    finally:
        reply.close()


async def _events(
    reply: aiohttp.ClientResponse, api: Api, url: str
) -> AsyncGenerator[Sequence[bytes], None]:
    parser, told = SseParser(), False
    with typed_errors(url):
        async for received in reply.content.iter_any():
            if events := parser.feed(received):
                if not told:
                    told = True
                    tracing.current().event(ENGINE_ANSWERED)
                yield events
                if events[-1] == DONE:
                    await _drain(reply)
                    return
    last = parser.close()
    if last:
        yield last
    if DONE not in last and api is not Api.RESPONSES:
        raise engine_errors.lost(url, "the stream ended early")


async def _drain(reply: aiohttp.ClientResponse) -> None:
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            await reply.read()
    except (TimeoutError, aiohttp.ClientError, ConnectionError):
        return  # closed instead of kept; the answer was whole
