"""Writes HTTP replies over ASGI, whole or as a stream, with the faults asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from services.sim.faults import Fault, FaultKind, first
from services.worker.clock import Clock

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"


class ReplyWriter:
    """One reply.

    Args:
        send: ASGI's send.
        faults: those about writing are applied here.
        clock: for a late first byte.
    """

    def __init__(self, send: Send, faults: Sequence[Fault], clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._late = first(faults, FaultKind.SLOW_FIRST_BYTE)
        self._bytewise = first(faults, FaultKind.BYTE_BY_BYTE) is not None
        self._crlf = first(faults, FaultKind.CRLF) is not None
        self._comments = first(faults, FaultKind.COMMENTS) is not None

    async def whole(self, status: int, body: bytes) -> None:
        """A reply in one piece."""
        await self._start(status, JSON, length=len(body))
        await self._write(body)
        await self._end()

    async def open_stream(self) -> None:
        """Begin a stream of events."""
        await self._start(200, EVENT_STREAM)

    async def events(self, payloads: Sequence[bytes]) -> None:
        """Events, written together."""
        if not payloads:
            return
        newline = b"\r\n" if self._crlf else b"\n"
        between = b": keep-alive" + newline * 2 if self._comments else b""
        await self._write(
            b"".join(between + b"data: " + payload + newline * 2 for payload in payloads)
        )

    async def close_stream(self) -> None:
        """The event that ends the stream, and the end of the body."""
        await self.events([b"[DONE]"])
        await self._end()

    async def _start(self, status: int, content_type: str, *, length: int | None = None) -> None:
        if self._late is not None:
            await self._clock.sleep(self._late.seconds)
        headers = [(b"content-type", content_type.encode())]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, body: bytes) -> None:
        if not self._bytewise:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            return
        for index in range(len(body)):
            piece = body[index : index + 1]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
