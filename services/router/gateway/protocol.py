"""The HTTP connection, closed if a request does not come or its head is too large."""

from __future__ import annotations

import asyncio
from typing import Any

from services.router.gateway.framing import FramedProtocol, RefusedError

_BYTES_BETWEEN = 4
"""Of a header: the colon, a space and the end of the line."""


def with_head_limits(seconds: float, max_bytes: int) -> type[FramedProtocol]:
    """A protocol whose requests have to bring their whole head in time, and no more.

    The server itself limits only how long a connection may be idle between two
    requests, so that a head of which one byte comes now and then holds a
    connection for ever; and it keeps a head of any size.

    What else comes while no answer is due has the same time: the body of a request
    that was answered before its end, and bytes that begin no request.

    Args:
        seconds: from the connection, the head's first byte, or the early answer.
        max_bytes: of the request's target with its headers, each with four bytes
            for what stands between. Also of anything else that is neither a body
            nor ends, such as trailers.
    """

    class _Protocol(FramedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._timer: asyncio.TimerHandle | None = None
            self._told = False  # the parser has reported a body or an end
            self._untold_bytes = 0  # since it last did

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._told = False
            super().data_received(data)
            if self.transport.is_closing():
                return
            # What came along with a body or an end is left out: it was bounded by one read.
            self._untold_bytes = 0 if self._told else self._untold_bytes + len(data)
            if self._untold_bytes > max_bytes:
                return self._refuse(_too_large(max_bytes))
            if self._answers():
                return  # looked at again when the answer has ended
            if self._in_request or not self._told:
                self._await_request()
            else:  # the end of a body that nobody waited for
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

        def on_headers_complete(self) -> None:
            size = len(self.url) + _BYTES_BETWEEN * len(self.headers)
            size += sum(len(name) + len(value) for name, value in self.headers)
            if size > max_bytes:
                raise _too_large(max_bytes)
            super().on_headers_complete()
            self._told = True
            self._stop_waiting()

        def on_body(self, body: bytes) -> None:
            self._told = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._told = True
            super().on_message_complete()
            self._stop_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._in_request and not self._answers():
                self._await_request()

        def _await_request(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                message = f"the head of the request did not come in {seconds:g} s"
                self._refuse(RefusedError(408, message))

    return _Protocol


def _too_large(max_bytes: int) -> RefusedError:
    return RefusedError(431, f"the head or the trailers have more than {max_bytes} bytes")
