"""The HTTP connection, closed if a request does not come or its head is too large."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.router.gateway.errors import error_body

_STATUS = 408


def with_head_limits(seconds: float, max_bytes: int) -> type[HttpToolsProtocol]:
    """A protocol whose requests have to bring their whole head in time, and no more.

    The server itself limits only how long a connection may be idle between two
    requests, so that a head of which one byte comes now and then holds a
    connection for ever; and it keeps a head of any size.

    Args:
        seconds: from the connection, or from the head's first byte.
        max_bytes: of the request line with the headers.
    """

    class _Protocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._head_timer: asyncio.TimerHandle | None = None
            self._in_head = False
            self._head_bytes = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._in_head or self.transport.is_closing():
                return
            self._head_bytes += len(data)
            if self._head_bytes > max_bytes:
                return self._refuse()
            if not self._answers():  # else when the answer has ended
                self._await_head()

        def on_message_begin(self) -> None:
            self._in_head, self._head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_waiting()
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > max_bytes:
                raise httptools.HttpParserError("the head is too large")
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._in_head:
                self._await_head()

        def _answers(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _await_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _refuse(self) -> None:
            self.send_400_response("Invalid HTTP request received.")

        def _give_up(self) -> None:
            if self.transport.is_closing():
                return
            if self._in_head:  # else an error would be read as the next answer
                self.transport.write(_too_late(seconds))
            self.transport.close()

    return _Protocol


def _too_late(seconds: float) -> bytes:
    body = error_body(_STATUS, f"the head of the request did not come in {seconds:g} s")
    head = (
        f"HTTP/1.1 {_STATUS} Request Timeout\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
