"""The HTTP connection, on which no byte of one request counts as part of another."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.router.gateway.errors import error_body


class RefusedError(Exception):
    """What a client sent is not taken, and its connection ends.

    Args:
        status: HTTP status.
        message: for the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class FramedProtocol(HttpToolsProtocol):
    """A connection of uvicorn with what uvicorn leaves to its parser done.

    The parser takes a request with `Upgrade` for the last one that is HTTP. No
    such offer is ever accepted here, so that the request is one like any other and
    its body has to be read (RFC 9110, 7.8); else the body would be the next request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._in_request = False
        self._body_left = 0  # of a request after whose head the parser stopped
        self._running: RequestResponseCycle | None = None  # self.cycle may be a later one

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_running()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback has raised
            unreadable = RefusedError(400, "this is not a valid HTTP request")
            self._refuse(cause if isinstance(cause, RefusedError) else unreadable)

    def on_message_begin(self) -> None:
        self._in_head = self._in_request = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        named = dict(self.headers)
        if b"host" not in named and self.parser.get_http_version() == "1.1":
            raise RefusedError(400, "the request has no Host header")
        if self.parser.should_upgrade():
            if b"transfer-encoding" in named or self.parser.get_method() == b"CONNECT":
                raise RefusedError(400, "the request offers a protocol that is not spoken here")
            self._body_left = int(named.get(b"content-length", 0))
        super().on_headers_complete()
        self._in_head = False
        self.headers = []  # takes trailers, which must not be read as headers

    def on_message_complete(self) -> None:
        if not self._body_left:  # else it is only the head that is complete
            self._in_request = False
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _parse(self, data: bytes) -> bytes:
        """Read some of it, and return what is left."""
        if self._body_left:
            piece, rest = data[: self._body_left], data[self._body_left :]
            self._body_left -= len(piece)
            self.on_body(piece)
            if not self._body_left:
                self.on_message_complete()
            return rest
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            return data[stop.args[0] :]
        return b""

    def _answers(self) -> bool:
        """Whether any request has come whose answer has not ended."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: RefusedError) -> None:
        """Close the connection, with an error if it is the refused request's turn."""
        if self._is_next():
            self.transport.write(_reply(error))
        self.transport.close()
        self._cancel_running()

    def _is_next(self) -> bool:
        """Whether what is sent now is read as the answer to the request that is coming in."""
        if self._in_head:
            return not self._answers()
        running = self._running is self.cycle and self._answers()
        return running and not self.cycle.response_started

    def _cancel_running(self) -> None:
        """End the request that runs, which uvicorn forgets once a later one has come."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()


def _reply(error: RefusedError) -> bytes:
    body = error_body(error.status, error.message)
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body
