"""vLLM over HTTP: connections, and what can go wrong with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvloop.errors import UnavailableError
from services.worker import http_replies
from services.worker.engine import DONE, Api, EngineGauges
from services.worker.http_engine import HttpEngine, open_engine, read_gauges
from tests.unit.worker.fake_vllm import BREAK, Answer, FakeVllm, fake_vllm, sse
from tests.unit.worker.fakes import until

CHAT = Api.CHAT_COMPLETIONS


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with fake_vllm() as fake:
        yield fake


@pytest.fixture
async def engine(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpEngine]:
    """Its connections are kept, however busy the machine is."""
    monkeypatch.setattr(http_replies, "_DRAIN_SECONDS", 30)
    async with open_engine(
        vllm.url, max_connections=10, connect_timeout_seconds=30, keep_alive_seconds=30
    ) as engine:
        yield engine


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid:1"])
async def test_an_engine_that_cannot_be_reached_was_surely_not_reached(url: str) -> None:
    async with open_engine(url, max_connections=1, connect_timeout_seconds=1) as engine:
        for call in (engine.complete(CHAT, b"{}"), engine.tokenize(b"{}"), engine.gauges()):
            with pytest.raises(UnavailableError) as caught:
                await call
            assert caught.value.reason == "ENGINE_UNREACHABLE"
            assert caught.value.metadata["reached"] == "false"
        with pytest.raises(UnavailableError) as caught:
            async with engine.stream(CHAT, b"{}"):
                pass
        assert caught.value.reason == "ENGINE_UNREACHABLE"
        assert not await engine.healthy()


async def test_a_connection_cut_before_the_reply_may_have_reached_the_engine(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    vllm.answers[CHAT] = Answer(steps=[BREAK])
    with pytest.raises(UnavailableError) as caught:
        await engine.complete(CHAT, b"{}")
    assert caught.value.reason == "ENGINE_LOST"
    assert caught.value.metadata["reached"] == "true"


async def test_a_stream_that_ends_cleanly_but_without_done_is_lost(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    vllm.answers[CHAT] = Answer(steps=sse(b'{"a":1}', done=False))
    with pytest.raises(UnavailableError) as caught:
        async with engine.stream(CHAT, b"{}") as batches:
            assert [payload async for batch in batches for payload in batch]
    assert caught.value.reason == "ENGINE_LOST"


async def test_an_engine_that_dies_after_done_has_answered(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    read = asyncio.Event()
    vllm.answers[CHAT] = Answer(steps=[*sse(b'{"a":1}'), read, BREAK])
    payloads: list[bytes] = []
    async with engine.stream(CHAT, b"{}") as batches:
        async for batch in batches:
            payloads += batch
            if DONE in batch:
                read.set()
    assert payloads == [b'{"a":1}', DONE]


async def test_a_last_event_without_newline_still_counts(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    vllm.answers[CHAT] = Answer(steps=[b'data: {"a":1}\n\ndata: [DONE]'])
    async with engine.stream(CHAT, b"{}") as batches:
        assert [payload async for batch in batches for payload in batch] == [b'{"a":1}', DONE]


async def test_bytes_that_come_one_by_one_give_the_same_events(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    text = 'data: {"a":"你好👍"}\r\n\r\ndata: [DONE]\r\n\r\n'.encode()
    vllm.answers[CHAT] = Answer(steps=[text[i : i + 1] for i in range(len(text))])
    async with engine.stream(CHAT, b"{}") as batches:
        payloads = [payload async for batch in batches for payload in batch]
    assert payloads == ['{"a":"你好👍"}'.encode(), DONE]


async def test_cancelling_a_whole_reply_closes_the_connection(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    vllm.answers[CHAT] = Answer(hold=asyncio.Event())
    async with asyncio.TaskGroup() as group:
        task = group.create_task(engine.complete(CHAT, b"{}"))
        await until(lambda: vllm.received)
        task.cancel()
    async with asyncio.timeout(20):
        await vllm.received[0].disconnected.wait()


async def test_the_connection_is_kept_after_a_whole_stream(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    vllm.answers[CHAT] = Answer(steps=sse(b'{"a":1}'))
    for _ in range(3):
        async with engine.stream(CHAT, b"{}") as batches:
            assert [payload async for batch in batches for payload in batch]
    assert len({id(received.connection) for received in vllm.received}) == 1


async def test_large_bodies_arrive_whole(vllm: FakeVllm, engine: HttpEngine) -> None:
    body = b'{"prompt":"' + b"x" * 5_000_000 + b'"}'
    vllm.answers[CHAT] = Answer(body=body)
    assert await engine.complete(CHAT, body) == body
    assert vllm.received[0].raw == body


def test_gauges_of_an_engine_that_reports_none_are_zero() -> None:
    assert read_gauges("# nothing here\npython_info 1.0\n") == EngineGauges(0, 0, 0.0)
