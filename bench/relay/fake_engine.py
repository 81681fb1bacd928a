"""An engine that costs next to nothing: what it answers is written before it starts.

    python -m bench.relay.fake_engine ROLE EVENTS_SOCKET|-

Prints its port. A body says how it is answered, by plain text that is searched for and
never parsed: `"max_tokens":N` tokens, `"gap_us":N` between two of them (0: as fast as
the reader takes them, `"burst":N` in one write). A prefill engine answers at once, with
params of the size that vLLM's have; a decode engine tells the sidecar about each turn that
it has finished.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from itertools import count
from typing import cast

import uvloop

from bench.relay import replies

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_UNKNOWN = -1
"""Bytes that are missing of a body that says at its end that it ends."""
_BURST = 64
"""Tokens that a fast stream writes before others get a turn, if the body does not say."""
_END = b"\r\n\r\n"
_CHUNKED = re.compile(rb"transfer-encoding: *chunked", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class FakeEngine:
    """What all connections share.

    Args:
        role: prefill or decode.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.send_event: Callable[[bytes], None] | None = None
        self._numbers = count()

    def handed_over(self, body: bytes) -> bytes:
        """Prefill's reply."""
        return replies.PREFILL_BIG if len(body) > replies.BIG_BODY else replies.PREFILL_SMALL

    def finished(self, body: bytes) -> None:
        """Tell the sidecar that decode keeps a turn's KV."""
        turn_id = replies.text_of(body, b'"kvloop_turn_id":"')
        if self.send_event is not None and turn_id:
            number = next(self._numbers)
            self.send_event(replies.finished_event(turn_id, number, len(body)))


def _unchunked(body: bytes) -> bytes:
    """What the chunks of a body hold."""
    pieces: list[bytes] = []
    at = 0
    while True:
        start = body.index(b"\r\n", at) + 2
        size = int(body[at:start], 16)
        if not size:
            return b"".join(pieces)
        pieces.append(body[start : start + size])
        at = start + size + 2


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; requests follow each other."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._head = b""
        self._body: list[bytes] = []
        self._missing = 0
        self._path = b""
        self._paused = False
        self._left = 0
        self._gap = 0.0
        self._burst = _BURST
        self._request = b""
        self._due = 0.0
        self._next: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        self._loop = asyncio.get_running_loop()
        self._transport.set_write_buffer_limits(high=64 * 1024)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            self._head += data
            end = self._head.find(_END)
            if end < 0:
                return
            head, data = self._head[:end], self._head[end + len(_END) :]
            self._head, self._body = b"", []
            self._path = head.split(b" ", 2)[1]
            found = _LENGTH.search(head)
            self._missing = int(found[1]) if found else 0
            if _CHUNKED.search(head):
                self._missing = _UNKNOWN
            if b"100-continue" in head.lower():
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._body.append(data)
        if self._missing == _UNKNOWN:
            if data.endswith(b"\n") and (body := b"".join(self._body)).endswith(_LAST_CHUNK):
                self._missing = 0
                self._answer(_unchunked(body))
            return
        self._missing -= len(data)
        if not self._missing:
            self._answer(b"".join(self._body))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._left and not self._gap:
            self._next = self._loop.call_soon(self._write_fast)

    def _answer(self, body: bytes) -> None:
        write = self._transport.write
        if self._path == b"/v1/models":
            write(replies.whole(replies.MODELS))
        elif self._path in (b"/health", b"/metrics"):
            write(replies.whole(b""))
        elif self._engine.role == "prefill":
            write(self._engine.handed_over(body))
        else:
            self._request = body
            self._left = replies.number_of(body, b'"max_tokens":', 16)
            self._gap = replies.number_of(body, b'"gap_us":', 0) / 1e6
            self._burst = replies.number_of(body, b'"burst":', _BURST)
            write(replies.STREAM_HEAD)
            if self._gap:
                self._due = self._loop.time()
                self._write_slowly()
            else:
                self._write_fast()

    def _write_fast(self) -> None:
        if self._paused:
            return  # goes on in resume_writing
        events = min(self._left, self._burst)
        self._left -= events
        if not self._left:
            self._finish(replies.TOKEN * events)
            return
        self._transport.write(replies.TOKEN * events)
        self._next = self._loop.call_soon(self._write_fast)

    def _write_slowly(self) -> None:
        self._left -= 1
        if not self._left:
            self._finish(replies.TOKEN)
            return
        self._transport.write(replies.TOKEN)
        self._due += self._gap
        self._next = self._loop.call_at(self._due, self._write_slowly)

    def _finish(self, rest: bytes) -> None:
        self._engine.finished(self._request)
        self._transport.write(rest + replies.STREAM_END)


async def _serve(role: str, events_socket: str) -> None:
    engine = FakeEngine(role)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    if events_socket != "-":
        writer = await _connect(events_socket)
        writer.write(replies.hello(role))
        engine.send_event = writer.write
    await server.serve_forever()


async def _connect(path: str) -> asyncio.StreamWriter:
    while True:
        try:
            _, writer = await asyncio.open_unix_connection(path)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            return writer


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], sys.argv[2]))
