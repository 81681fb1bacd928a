"""Streams as bytes, between a scripted engine and an HTTP client, by FAULTS row.

The engine is a fake vLLM whose packets are cut as a test says; sidecar, router
and gateway are real.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.router import app as router_app
from services.router.settings import RouterSettings
from tests.flow.gateway.fleet import CHAT, HttpReply
from tests.flow.patience import PATIENT_ROUTER
from tests.flow.router.fakes import eventually, fake_kvmeta, serve_kvmeta
from tests.flow.router.memory_ledger import MemoryLedger
from tests.flow.worker.stack import SidecarStack, sidecar
from tests.unit.worker.fake_vllm import BREAK, Answer, chunk, error_body, sse, usage_chunk

BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"stream":true}'
WHOLE = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
TEXT, LAST = chunk("你好👍"), chunk("", "stop")


@dataclass
class Line:
    """One engine's way to an HTTP client."""

    worker: SidecarStack
    session: aiohttp.ClientSession
    url: str
    router: router_app.Router
    path: str = CHAT

    def answers(self, answer: Answer) -> None:
        """What the engine answers from now on."""
        self.worker.vllm.answers[self.path] = answer

    def streams(self, *steps: bytes | asyncio.Event | object) -> None:
        """What the engine streams from now on, as packets."""
        self.answers(Answer(steps=list(steps)))

    @asynccontextmanager
    async def open(self, body: bytes = BODY) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose reply has begun."""
        async with self.session.post(self.url + self.path, data=body) as reply:
            yield reply

    async def ask(self, body: bytes = BODY) -> HttpReply:
        """The reply to the end."""
        async with self.open(body) as reply:
            return HttpReply(reply.status, reply.headers, await reply.read())


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(sidecar(tmp_path))
        kvmeta = fake_kvmeta(MemoryLedger(), [worker.kvmeta.registered[-1].worker])
        port = await stack.enter_async_context(serve_kvmeta(*kvmeta))
        values: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "gateway_listen": "127.0.0.1:0",
            "kvmeta": f"127.0.0.1:{port}",
            "shutdown_grace_seconds": 0,
            "derive_conversations": False,
            **PATIENT_ROUTER,
        }
        router = await stack.enter_async_context(router_app.build(RouterSettings(**values)))
        await eventually(router.pool.models)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Line(worker, session, f"http://127.0.0.1:{router.gateway_port}", router)


def _packets(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def _stream(payloads: Sequence[bytes]) -> bytes:
    return b"".join(sse(*payloads))


async def test_D1_the_first_event_is_passed_on_before_there_is_a_second(line: Line) -> None:
    gate = asyncio.Event()
    line.streams(*sse(b'{"a":1}', done=False), gate, *sse(LAST))
    async with line.open() as reply:
        assert await reply.content.readuntil(b"\n\n") == b'data: {"a":1}\n\n'
        assert not gate.is_set()
        gate.set()
        assert await reply.content.read() == _stream([LAST])


async def test_D1_every_event_is_passed_on_by_itself(line: Line) -> None:
    gates = [asyncio.Event() for _ in range(5)]
    steps: list[Any] = []
    for number, gate in enumerate(gates):
        steps += [*sse(b'{"n":%d}' % number, done=False), gate]
    line.streams(*steps, *sse(LAST))
    async with line.open() as reply:
        for number, gate in enumerate(gates):
            assert await reply.content.readuntil(b"\n\n") == b'data: {"n":%d}\n\n' % number
            gate.set()
        assert (await reply.content.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_D6_packets_may_be_cut_anywhere(line: Line, size: int) -> None:
    """Inside of characters, of lines, and between the two line ends of an event."""
    data = _stream([TEXT, LAST])
    line.streams(*_packets(data, size))
    assert (await line.ask()).raw == data


@pytest.mark.parametrize(
    "data",
    [
        _stream([TEXT, LAST]).replace(b"\n", b"\r\n"),
        b": comment\n\n" + _stream([TEXT, LAST]).replace(b"data: ", b"event: x\nid: 7\ndata: "),
        _stream([TEXT, LAST]).removesuffix(b"\n\n"),
        _stream([TEXT, LAST]).removesuffix(b"\n"),
        b"\xef\xbb\xbf" + _stream([TEXT, LAST]),
    ],
)
async def test_D6_other_spellings_of_an_event_stream_are_understood(
    line: Line, data: bytes
) -> None:
    line.streams(*_packets(data, 5))
    assert (await line.ask()).raw == _stream([TEXT, LAST])


async def test_D6_a_large_event_stays_whole(line: Line) -> None:
    large = chunk("x" * 3_000_000)
    line.streams(*sse(large, LAST))
    assert (await line.ask()).raw == _stream([large, LAST])


async def test_D4_a_reply_lives_as_long_as_its_reader(line: Line) -> None:
    """Whole reply or nothing: a reader that is slow does not get a shortened one."""
    payloads = [chunk("x" * 100_000) for _ in range(50)]
    line.streams(*sse(*payloads, LAST))
    received = bytearray()
    async with line.open() as reply:
        async for piece in reply.content.iter_any():
            received += piece
            await asyncio.sleep(0)
    assert bytes(received) == _stream([*payloads, LAST])


async def test_D8_null_content_and_unknown_members_pass(line: Line) -> None:
    odd = b'{"choices":[{"index":0,"delta":{"content":null,"x":1.50}}],"v":12345678901234567890}'
    line.streams(*sse(odd, LAST))
    assert (await line.ask()).raw == _stream([odd, LAST])


async def test_D9_params_in_the_last_chunk_stay_inside(line: Line) -> None:
    inside = LAST[:-1] + b',"kv_transfer_params":{"remote_host":"10.0.0.1"}}'
    line.streams(*sse(TEXT, inside))
    assert (await line.ask()).raw == _stream([TEXT, LAST])


async def test_an_error_before_the_first_chunk_is_a_status(line: Line) -> None:
    body = error_body("too long", 400)
    line.answers(Answer(status=400, body=body))
    reply = await line.ask()
    assert (reply.status, reply.raw) == (400, body)
    line.streams(*sse(body))
    reply = await line.ask()
    assert (reply.status, reply.raw) == (400, body)


@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
async def test_D8_errors_keep_status_and_body_in_both_forms(line: Line, status: int) -> None:
    body = error_body("engine says no: 你好", status)
    line.answers(Answer(status=status, body=body))
    for asked in (BODY, WHOLE):
        reply = await line.ask(asked)
        assert (reply.status, reply.raw) == (status, body)


async def test_an_error_after_the_first_chunk_is_an_event(line: Line) -> None:
    body = error_body("out of memory", 500, "InternalServerError")
    line.streams(*sse(TEXT, body))
    reply = await line.ask()
    assert reply.status == 200
    assert reply.raw == _stream([TEXT, body])


async def test_an_engine_that_dies_in_the_middle_is_an_event(line: Line) -> None:
    line.streams(*sse(TEXT, done=False), BREAK)
    reply = await line.ask()
    first, second = reply.events
    assert first == json.loads(TEXT)
    assert second["error"]["code"] == 503
    assert "127.0.0.1" not in second["error"]["message"]


async def test_a_usage_chunk_that_was_not_asked_for_is_held_back(line: Line) -> None:
    line.streams(*sse(TEXT, LAST, usage_chunk()))
    assert (await line.ask()).raw == _stream([TEXT, LAST])
    asked = BODY[:-1] + b',"stream_options":{"include_usage":true}}'
    assert (await line.ask(asked)).raw == _stream([TEXT, LAST, usage_chunk()])


@pytest.mark.parametrize("body", [BODY, WHOLE])
async def test_a_client_that_hangs_up_stops_the_engine(line: Line, body: bytes) -> None:
    """B3: before the first token as well as after."""
    hold = asyncio.Event()
    line.answers(Answer(hold=hold))
    asking = asyncio.ensure_future(line.ask(body))
    await eventually(lambda: line.worker.vllm.requests(CHAT))
    asking.cancel()
    await asyncio.wait([asking])
    (received,) = line.worker.vllm.requests(CHAT)
    await eventually(received.disconnected.is_set)
    await eventually(lambda: line.worker.worker.admission.in_flight == 0)
    registry = line.router.metrics.registry
    await eventually(
        lambda: registry.get_sample_value("kvloop_router_turns_total", {"outcome": "cancelled"})
    )


async def test_a_client_that_hangs_up_in_the_middle_stops_the_engine(line: Line) -> None:
    line.streams(*sse(TEXT, done=False), asyncio.Event())
    async with line.open() as reply:
        await reply.content.readuntil(b"\n\n")
    (received,) = line.worker.vllm.requests(CHAT)
    await eventually(received.disconnected.is_set)
