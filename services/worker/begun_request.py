"""A request to vLLM whose body comes in two parts, over vLLM's own HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import aiohttp
import structlog
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from kvloop.errors import KvloopError
from services.common import tracing
from services.worker import engine_errors
from services.worker.engine import Api
from services.worker.http_replies import (
    ENGINE_ANSWERED,
    ENGINE_ASKED,
    read,
    streamed,
    typed_errors,
)

_log = structlog.get_logger(__name__)

_PIECE_BYTES = 512 * 1024


class HttpBegunRequest:
    """Implements the BegunRequest port. Made by `HttpEngine.begin`.

    Args:
        session: used for the request.
        url: the engine's base URL.
        api: endpoint to ask.
        head: first part of the body.
        headers: of the request.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        api: Api,
        head: bytes,
        headers: Mapping[str, str],
    ) -> None:
        self._session = session
        self._url = url
        self._api = api
        self._headers = headers
        self._body = _TwoParts(head)
        self._closed = False
        self._posting: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        """Set when the reply has begun, or surely will not."""
        self._reply: aiohttp.ClientResponse | None = None
        self._failure: KvloopError | None = None

    async def run(self) -> None:
        """See `BegunRequest.run`."""
        if self._closed:
            return
        async with asyncio.TaskGroup() as group:  # so that `close` can end it
            self._posting = group.create_task(self._post(), name="begun-request")

    async def finish(self, rest: bytes) -> bool:
        """See `BegunRequest.finish`."""
        if self._ended.is_set():
            return False
        tracing.current().event(ENGINE_ASKED)
        self._body.give(rest)
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        if self._reply is None and self._body.complete:
            raise self._failure or engine_errors.lost(self._url, "the request was given up")
        return self._reply is not None

    def stream(self) -> AbstractAsyncContextManager[AsyncIterator[Sequence[bytes]]]:
        """See `BegunRequest.stream`."""
        return streamed(self._answer(), self._api, self._url)

    async def complete(self) -> bytes:
        """See `BegunRequest.complete`."""
        with typed_errors(self._url):
            async with self._answer() as reply:
                answer = await read(reply)
        tracing.current().event(ENGINE_ANSWERED)
        return answer

    def close(self) -> None:
        """See `BegunRequest.close`."""
        self._closed = True
        if self._posting is not None:
            self._posting.cancel()
        if self._reply is not None:
            self._reply.close()
        self._ended.set()

    def _answer(self) -> aiohttp.ClientResponse:
        assert self._reply is not None, "finish() comes first, and says whether there is a reply"
        return self._reply

    async def _post(self) -> None:
        try:
            with typed_errors(self._url):
                reply = await self._session.post(
                    self._url + self._api, data=self._body, headers=self._headers
                )
            if self._body.complete:
                self._reply = reply
            else:
                reply.close()
                _log.warning("engine_answered_early", url=self._url, http_status=reply.status)
        except KvloopError as error:
            self._failure = error
        except Exception:
            # Whoever runs this runs other requests too, which a defect must not end.
            _log.exception("begun_request_failed")
        finally:
            self._ended.set()


class _TwoParts(Payload):
    """A chunked body whose second part is there later."""

    def __init__(self, head: bytes) -> None:
        super().__init__(head, content_type="application/json")
        self._rest = b""
        self._given = asyncio.Event()
        self.complete = False
        """Whether the second part has been written; until then the engine surely has
        not seen a whole request."""

    def give(self, rest: bytes) -> None:
        """Have the second part written."""
        self._rest = rest
        self._given.set()

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the first part now, and the second with the end when it is there."""
        head, self._value = self._value, None
        for start in range(0, len(head), _PIECE_BYTES):
            await writer.write(head[start : start + _PIECE_BYTES])
        del head  # whoever began the request may keep it; here it is not needed again
        await self._given.wait()
        self.complete = True
        await writer.write_eof(self._rest)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Not for bodies that are not there yet."""
        raise TypeError("a body in two parts cannot be read")
