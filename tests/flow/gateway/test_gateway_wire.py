"""What is one request on a connection, byte for byte, and how connections end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from services.router.gateway import http, server
from tests.flow.patience import HELD_UP_SECONDS
from tests.flow.router.fakes import eventually

MAX_HEAD = 2000
FLOOD = 1024 * 1024
"""More than the server reads at once, and still more than a head may have."""
GET = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /%s HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
LIMITS = http.BodyLimits(max_bytes=1024 * 1024, seconds=60, bytes_per_second=1e6)


@dataclass
class Site:
    """An application that notes what it is asked.

    It answers with what it read; on /early before it reads, on /wait never, and on
    /stream without an end.
    """

    seen: list[tuple[str, bytes]] = field(default_factory=list)
    """Path and body of each request that was read."""
    headers: list[list[bytes]] = field(default_factory=list)
    """Names of each request's headers, after its body."""
    running: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = request.url.path
        if path == "/early":
            return await http.reply(send, 401, b"{}", {})
        try:
            body = await http.read_body(request, LIMITS)
        except ClientDisconnect:
            return
        self.seen.append((path, body))
        self.headers.append([name for name, _ in scope["headers"]])
        if path in ("/wait", "/stream"):
            return await http.while_connected(receive, self._work(send, path == "/stream"))
        await http.reply(send, 200, b"<%s>" % path.encode(), {})

    async def _work(self, send: Send, streams: bool) -> None:
        self.running += 1
        try:
            if not streams:
                await asyncio.Event().wait()
            await http.start(send, 200, http.EVENT_STREAM, {})
            while True:
                await http.write(send, b"tick", more=True)
                await asyncio.sleep(0.01)
        finally:
            self.running -= 1


class Wire:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(0.005)  # so that the pieces arrive as pieces

    async def until(self, text: bytes) -> bytes:
        """What comes up to a text."""
        return await asyncio.wait_for(self._reader.readuntil(text), 20)

    async def to_the_end(self) -> bytes:
        """What comes until the server closes the connection, which it soon has to."""
        return await asyncio.wait_for(self._reader.read(), 20)

    async def flood(self, piece: bytes) -> None:
        """Send a text again and again; the server must close the connection."""
        with suppress(ConnectionError):
            for _ in range(16):
                await self.send(piece * (FLOOD // 16 // len(piece)))
        with suppress(ConnectionError):
            await self.to_the_end()

    def hang_up(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected(
    monkeypatch: pytest.MonkeyPatch, head_timeout_seconds: float = 60
) -> AsyncIterator[tuple[Wire, Site]]:
    """A connection to the gateway's server, with the application behind it."""
    monkeypatch.setattr(server, "MAX_HEAD_BYTES", MAX_HEAD)
    site = Site()
    async with (
        asyncio.TaskGroup() as tasks,
        server.serve(
            site,
            "127.0.0.1:0",
            tasks,
            grace_seconds=1,
            head_timeout_seconds=head_timeout_seconds,
        ) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield Wire(reader, writer), site
        finally:
            writer.close()


def error_of(reply: bytes, status: int) -> str:
    """The message of an error that is all of what came."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["code"] == status
    return str(error["message"])


OFFER = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
)
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\nauthorization: Bearer other\r\n\r\n"


@pytest.mark.parametrize("piece", [1, 40, 10_000])
async def test_a_body_behind_an_offered_protocol_is_no_request(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    async with connected(monkeypatch) as (wire, site):
        sent = POST % b"outer" + OFFER + b"content-length: %d\r\n\r\n" % len(SMUGGLED)
        sent += SMUGGLED + GET
        await wire.send(*(sent[at : at + piece] for at in range(0, len(sent), piece)))
        await wire.until(b"</next>")
        assert site.seen == [("/outer", SMUGGLED), ("/next", b"")]


async def test_an_offered_protocol_without_a_body_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected(monkeypatch) as (wire, site):
        await wire.send(b"GET /offer HTTP/1.1\r\nhost: x\r\n" + OFFER + b"\r\n" + GET)
        await wire.until(b"</next>")
        assert site.seen == [("/offer", b""), ("/next", b"")]


@pytest.mark.parametrize(
    "head",
    [
        POST % b"outer" + OFFER + CHUNKED + b"3\r\nabc\r\n0\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_what_cannot_be_delimited_is_refused(
    monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    async with connected(monkeypatch) as (wire, site):
        await wire.send(head + GET)
        assert "protocol" in error_of(await wire.to_the_end(), 400)
        assert site.seen == []


@pytest.mark.parametrize("path", [b"body", b"early"])
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"0\r\n", b"x-filler: " + b"x" * 500 + b"\r\n"),
        (b"0\r\nx-filler: ", b"x" * 500),
        (b"3;", b"x" * 500),
    ],
    ids=["many trailers", "one trailer", "chunk extension"],
)
async def test_what_never_ends_a_body_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, path: bytes, begin: bytes, piece: bytes
) -> None:
    async with connected(monkeypatch) as (wire, site):
        await wire.send(POST % path + CHUNKED + begin)
        await wire.flood(piece)
        assert site.seen == []


async def test_line_ends_without_a_request_end_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected(monkeypatch) as (wire, _):
        await wire.send(GET)
        await wire.until(b"</next>")
        await wire.flood(b"\r\n")


@pytest.mark.parametrize("at_once", [True, False])
async def test_trailers_are_no_headers_of_this_request_or_the_next(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    async with connected(monkeypatch) as (wire, site):
        trailers = b"0\r\nauthorization: Bearer other\r\nx-last: 1\r\n\r\n"
        pieces = [POST % b"body" + CHUNKED, b"3\r\nabc\r\n", trailers + GET]
        await wire.send(*([b"".join(pieces)] if at_once else pieces))
        await wire.until(b"</next>")
        assert site.seen == [("/body", b"abc"), ("/next", b"")]
        assert site.headers == [[b"host", b"transfer-encoding"], [b"host"]]


async def test_a_client_that_asks_further_and_hangs_up_ends_its_running_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected(monkeypatch) as (wire, site):
        await wire.send(POST % b"stream" + b"content-length: 0\r\n\r\n")
        await wire.until(b"tick")
        await wire.send(GET)
        assert site.running == 1
        wire.hang_up()
        await eventually(lambda: site.running == 0)
        assert site.seen == [("/stream", b"")]


async def test_a_line_end_between_requests_does_not_keep_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected(monkeypatch, head_timeout_seconds=0.2) as (wire, _):
        await wire.send(GET)
        await wire.until(b"</next>")
        await wire.send(b"\r\n")
        assert await wire.to_the_end() == b""


@pytest.mark.parametrize("body", [b"", b"a"])
async def test_a_body_that_comes_slowly_after_its_answer_does_not_keep_a_connection(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    async with connected(monkeypatch, head_timeout_seconds=0.2) as (wire, _):
        await wire.send(POST % b"early" + b"content-length: 1000\r\n\r\n")
        await wire.until(b"{}")
        ended = asyncio.ensure_future(wire.to_the_end())
        while not ended.done():
            with suppress(ConnectionError):
                await wire.send(body)
            await asyncio.wait([ended], timeout=0.05)
        with suppress(ConnectionError):  # bytes that were sent too late
            assert await ended == b""


async def test_a_body_that_ends_after_its_answer_leaves_the_connection_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected(monkeypatch, head_timeout_seconds=HELD_UP_SECONDS) as (wire, _):
        await wire.send(POST % b"early" + b"content-length: 6\r\n\r\n")
        await wire.until(b"{}")
        await wire.send(b"abc", b"def")
        await asyncio.sleep(HELD_UP_SECONDS + 0.5)  # idle for longer than a head may take
        await wire.send(GET)
        await wire.until(b"</next>")


@pytest.mark.parametrize("wrong", [b"GET / HTTP/1.1\r\nx: " + b"x" * MAX_HEAD, b"\x16\x03\x01"])
@pytest.mark.parametrize("path", [b"stream", b"wait"])
async def test_a_refusal_is_never_read_as_another_requests_answer(
    monkeypatch: pytest.MonkeyPatch, path: bytes, wrong: bytes
) -> None:
    async with connected(monkeypatch) as (wire, site):
        await wire.send(POST % path + b"content-length: 0\r\n\r\n")
        await eventually(lambda: site.running == 1)
        await wire.send(wrong)
        answer = await wire.to_the_end()
        assert answer.count(b"HTTP/1.1") == (path == b"stream")
        assert b"error" not in answer
        await eventually(lambda: site.running == 0)


async def test_a_body_that_is_no_body_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(monkeypatch) as (wire, site):
        await wire.send(POST % b"body" + CHUNKED, b"size\r\n")
        error_of(await wire.to_the_end(), 400)
        assert site.seen == []


async def test_a_body_does_not_count_as_the_next_head(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(monkeypatch) as (wire, site):
        body = b"x" * 5 * MAX_HEAD
        sent = POST % b"body" + b"content-length: %d\r\n\r\n" % len(body) + body
        await wire.send(sent + GET[:5], GET[5:])
        await wire.until(b"</next>")
        assert site.seen == [("/body", body), ("/next", b"")]


@pytest.mark.parametrize(
    ("line", "count"), [(b"x: %s\r\n" % (b"x" * MAX_HEAD), 1), (b"a:\r\n", MAX_HEAD // 4)]
)
@pytest.mark.parametrize("end", [b"", b"\r\n"])
async def test_a_large_head_is_refused_with_an_error_object(
    monkeypatch: pytest.MonkeyPatch, line: bytes, count: int, end: bytes
) -> None:
    async with connected(monkeypatch) as (wire, site):
        await wire.send(b"GET / HTTP/1.1\r\nhost: x\r\n" + line * count + end)
        assert str(MAX_HEAD) in error_of(await wire.to_the_end(), 431)
        assert site.seen == []


async def test_only_HTTP_1_0_may_leave_out_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(monkeypatch) as (wire, site):
        await wire.send(b"GET /new HTTP/1.1\r\n\r\n")
        assert "Host" in error_of(await wire.to_the_end(), 400)
    async with connected(monkeypatch) as (wire, site):
        await wire.send(b"GET /old HTTP/1.0\r\n\r\n")
        assert (await wire.to_the_end()).endswith(b"</old>")
        assert site.seen == [("/old", b"")]
