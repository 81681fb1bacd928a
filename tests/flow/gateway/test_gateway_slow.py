"""Requests that come slowly, or are too large, hold no connection for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from services.router.gateway.server import MAX_HEAD_BYTES
from tests.flow.gateway.test_gateway_legs import Client, gateway
from tests.flow.router.fakes import eventually, waits

CHAT_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


class Wire:
    """One raw connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def to_the_end(self) -> bytes:
        """What comes until the gateway closes the connection."""
        return await self._reader.read()

    async def reply(self) -> bytes:
        """One reply with an empty body."""
        return await self._reader.readuntil(b"\r\n\r\n")


@asynccontextmanager
async def wire(client: Client) -> AsyncIterator[Wire]:
    """A connection that is closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.stack.router.gateway_port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


def _error(reply: bytes) -> tuple[bytes, str]:
    """Status line and message of an error; the reply must say that it is the last."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower()
    return head.splitlines()[0], json.loads(body)["error"]["message"]


async def test_a_head_that_does_not_come_is_a_timeout() -> None:
    async with gateway(head_timeout_seconds=0.2) as client, wire(client) as slow:
        await slow.send(CHAT_HEAD)
        status, message = _error(await slow.to_the_end())
        assert status == b"HTTP/1.1 408 Request Timeout"
        assert "head" in message
        assert client.stack.worker_calls == 0


async def test_a_byte_now_and_then_does_not_prolong_the_head() -> None:
    async with gateway(head_timeout_seconds=0.3) as client, wire(client) as slow:
        reading = asyncio.ensure_future(slow.to_the_end())
        sent = 0
        while not reading.done():
            try:
                await slow.send(CHAT_HEAD[sent : sent + 1])
            except ConnectionError:
                break
            sent += 1
            await asyncio.wait([reading], timeout=0.05)
        assert sent < len(CHAT_HEAD)
        with suppress(ConnectionError):  # closed with a byte that nobody had read
            assert (await reading).startswith(b"HTTP/1.1 408")


async def test_a_connection_without_any_request_is_closed_without_a_word() -> None:
    async with gateway(head_timeout_seconds=0.2) as client, wire(client) as silent:
        assert await silent.to_the_end() == b""


async def test_a_second_head_on_a_connection_has_its_own_time() -> None:
    async with gateway(head_timeout_seconds=1.0) as client, wire(client) as kept:
        await kept.send(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await kept.reply()).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(1.5)  # idle for longer than a head may take
        await kept.send(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\nGET /he")
        assert (await kept.reply()).startswith(b"HTTP/1.1 200")
        assert (await kept.to_the_end()).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(("pieces", "end"), [(1, b""), (1, b"\r\n\r\n"), (16, b"")])
async def test_a_head_above_the_limit_is_refused(pieces: int, end: bytes) -> None:
    async with gateway() as client, wire(client) as large:
        head = CHAT_HEAD + b"x-filler: " + b"x" * MAX_HEAD_BYTES + end
        size = -(-len(head) // pieces)
        for start in range(0, len(head), size):
            await large.send(head[start : start + size])
            await asyncio.sleep(0.005)  # so that the pieces arrive as pieces
        status, message = _error(await large.to_the_end())
        assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
        assert str(MAX_HEAD_BYTES) in message
        assert client.stack.worker_calls == 0


async def test_a_head_below_the_limit_is_taken() -> None:
    async with gateway() as client, wire(client) as large:
        filler = b"x" * (MAX_HEAD_BYTES - 1000)
        await large.send(
            b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-filler: " + filler + b"\r\n\r\n"
        )
        assert (await large.reply()).startswith(b"HTTP/1.1 200")


async def test_a_head_that_begins_during_an_answer_does_not_cut_it() -> None:
    async with gateway(head_timeout_seconds=1.0) as client, wire(client) as kept:
        gate = asyncio.Event()
        client.stack["d0"].mid_answer_steps = [waits(gate)]
        body = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"stream":true}'
        head = CHAT_HEAD + b"content-length: %d\r\n\r\n" % len(body)
        await kept.send(head + body + b"GET /he")
        await eventually(lambda: client.stack["d0"].decodes)
        await asyncio.sleep(1.5)  # longer than a head may take
        gate.set()
        answer = await kept.to_the_end()
        assert b"data: [DONE]" in answer
        assert answer.index(b"data: [DONE]") < answer.index(b"HTTP/1.1 408")


@pytest.mark.parametrize("framing", [b"content-length: 500", b"transfer-encoding: chunked"])
async def test_a_body_that_does_not_come_is_a_timeout(framing: bytes) -> None:
    async with gateway(body_timeout_seconds=0.2) as client, wire(client) as slow:
        await slow.send(CHAT_HEAD + framing + b"\r\n\r\n")
        status, message = _error(await slow.to_the_end())
        assert status.startswith(b"HTTP/1.1 408")
        assert "too slowly" in message
        assert client.stack.worker_calls == 0
        assert client.stack.count("turns_total", outcome="rejected") == 1


async def test_a_large_body_may_take_longer() -> None:
    """By its bytes: 0.1 s for a small one, a second more for each ten."""
    limits: dict[str, Any] = {"body_timeout_seconds": 0.1, "body_bytes_per_second": 10.0}
    body = b'{"model":"tiny","messages":[{"role":"user","content":"%s"}]}' % (b"x" * 200)
    async with gateway(**limits) as client, wire(client) as steady:
        await steady.send(
            CHAT_HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        await steady.send(body[:-10])
        await asyncio.sleep(0.5)
        await steady.send(body[-10:])
        assert (await steady.to_the_end()).startswith(b"HTTP/1.1 200")


async def test_a_body_above_the_limit_is_refused_before_it_is_read() -> None:
    async with gateway(max_body_bytes=1000) as client, wire(client) as large:
        await large.send(CHAT_HEAD + b"content-length: 1001\r\nexpect: 100-continue\r\n\r\n")
        status, message = _error(await large.to_the_end())
        assert status.startswith(b"HTTP/1.1 413")
        assert "1000 bytes" in message
