"""The HTTP connection, closed if a request does not come."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.router.gateway.errors import error_body

_STATUS = 408


def with_head_timeout(seconds: float) -> type[H11Protocol]:
    """A protocol whose requests have to bring their whole head in time.

    The server itself limits only how long a connection may be idle between two
    requests, so that a head of which one byte comes now and then holds a
    connection for ever.

    Args:
        seconds: from the connection, or from the head's first byte.
    """

    class _Protocol(H11Protocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._head_timer: asyncio.TimerHandle | None = None
            self._head_begun = False

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def _look(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._stop_waiting()
            elif self.conn.trailing_data[0]:  # a part of a head
                self._head_begun = True
                self._await_head()

        def _await_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(seconds, self._give_up)

        def _stop_waiting(self) -> None:
            self._head_begun = False
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _give_up(self) -> None:
            if self.transport.is_closing():
                return
            if self._head_begun:  # else an error would be read as the next answer
                self.transport.write(self._too_late())
            self.transport.close()

        def _too_late(self) -> bytes:
            body = error_body(_STATUS, f"the head of the request did not come in {seconds:g} s")
            head = h11.Response(
                status_code=_STATUS,
                reason=b"Request Timeout",
                headers=[
                    ("content-type", "application/json"),
                    ("content-length", str(len(body))),
                    ("connection", "close"),
                ],
            )
            events = (head, h11.Data(data=body), h11.EndOfMessage())
            return b"".join(self.conn.send(event) or b"" for event in events)

    return _Protocol
