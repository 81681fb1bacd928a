"""One suite for every engine: the fake one, and vLLM over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import pytest

from kvloop.errors import (
    InternalError,
    InvalidFieldError,
    KvloopError,
    ModelNotFoundError,
    UnavailableError,
)
from services.worker import engine_errors
from services.worker.engine import DONE, Api, Engine, EngineGauges, EngineModel, TokenCount
from services.worker.http_engine import open_engine
from tests.unit.worker.fake_vllm import BREAK, Answer, error_body, fake_vllm
from tests.unit.worker.fakes import FakeEngine, until

CHAT = Api.CHAT_COMPLETIONS


@dataclass
class Subject:
    """An engine and the means to script it."""

    engine: Engine
    reply: Callable[[int, bytes], None]
    """Script the next whole reply: status and body."""
    stream: Callable[[Sequence[bytes | asyncio.Event], bool], None]
    """Script a stream: data of events or pauses; False breaks it off at the end."""
    aborted: Callable[[], bool]
    """True once the engine has noticed that the caller is gone."""
    set_health: Callable[[bool], None]


def _fake() -> Subject:
    engine = FakeEngine()
    engine.load = EngineGauges(4, 2, 0.5)

    def reply(status: int, body: bytes) -> None:
        engine.replies.append(body if status == 200 else engine_errors.from_reply(status, body))
        engine.script = [engine_errors.from_reply(status, body)] if status != 200 else []

    def stream(steps: Sequence[bytes | asyncio.Event], whole: bool) -> None:
        engine.script = [*steps, DONE] if whole else steps

    def set_health(healthy: bool) -> None:
        engine.is_healthy = lambda: healthy

    return Subject(engine, reply, stream, lambda: engine.aborted > 0, set_health)


@pytest.fixture(params=["fake", "http"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "fake":
        yield _fake()
        return
    async with (
        fake_vllm() as vllm,
        open_engine(vllm.url, max_connections=10, connect_timeout_seconds=1) as engine,
    ):

        def reply(status: int, body: bytes) -> None:
            vllm.answers[CHAT] = Answer(status=status, body=body)

        def stream(steps: Sequence[bytes | asyncio.Event], whole: bool) -> None:
            framed: list[object] = [
                b"data: " + step + b"\n\n" if isinstance(step, bytes) else step for step in steps
            ]
            framed.append(b"data: [DONE]\n\n" if whole else BREAK)
            vllm.answers[CHAT] = Answer(steps=framed)

        yield Subject(
            engine,
            reply,
            stream,
            lambda: vllm.received[-1].disconnected.is_set(),
            lambda healthy: setattr(vllm, "healthy", healthy),
        )


async def _stream(engine: Engine) -> list[bytes]:
    async with engine.stream(CHAT, b"{}") as batches:
        return [payload async for batch in batches for payload in batch]


async def test_a_whole_reply_comes_as_it_was_written(subject: Subject) -> None:
    subject.reply(200, b'{ "a":1.0 }')
    assert await subject.engine.complete(CHAT, b"{}") == b'{ "a":1.0 }'


async def test_a_stream_gives_every_event_in_order_down_to_done(subject: Subject) -> None:
    subject.stream([b'{"a":1}', b'{"b":2}'], True)
    assert await _stream(subject.engine) == [b'{"a":1}', b'{"b":2}', DONE]


async def test_events_come_as_soon_as_they_are_there(subject: Subject) -> None:
    gate = asyncio.Event()
    subject.stream([b'{"a":1}', gate, b'{"b":2}'], True)
    async with subject.engine.stream(CHAT, b"{}") as batches:
        assert await anext(batches) == [b'{"a":1}']
        gate.set()
        assert [payload async for batch in batches for payload in batch] == [b'{"b":2}', DONE]


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, error_body("bad", 400), InvalidFieldError),
        (404, error_body("no", 404, "NotFoundError"), ModelNotFoundError),
        (500, error_body("oops", 500), InternalError),
    ],
)
async def test_errors_of_the_engine_are_typed_in_both_shapes(
    subject: Subject, status: int, body: bytes, kind: type[KvloopError]
) -> None:
    subject.reply(status, body)
    with pytest.raises(kind):
        await subject.engine.complete(CHAT, b"{}")
    with pytest.raises(kind):
        await _stream(subject.engine)


async def test_a_stream_that_breaks_off_is_lost(subject: Subject) -> None:
    subject.stream([b'{"a":1}'], False)
    with pytest.raises(UnavailableError) as caught:
        await _stream(subject.engine)
    assert caught.value.reason == "ENGINE_LOST"


async def test_leaving_a_stream_early_aborts_the_request(subject: Subject) -> None:
    subject.stream([b'{"a":1}', asyncio.Event()], True)
    async with subject.engine.stream(CHAT, b"{}") as batches:
        await anext(batches)
        assert not subject.aborted()
    await until(subject.aborted)


async def test_cancelling_a_stream_aborts_the_request(subject: Subject) -> None:
    begun = asyncio.Event()
    subject.stream([b'{"a":1}', asyncio.Event()], True)

    async def consume() -> None:
        async with subject.engine.stream(CHAT, b"{}") as batches:
            async for _ in batches:
                begun.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(consume())
        await begun.wait()
        task.cancel()
    await until(subject.aborted)


async def test_models_tokens_load_and_health(subject: Subject) -> None:
    engine = subject.engine
    assert list(await engine.models()) == [EngineModel("tiny", 4096)]
    assert await engine.tokenize(b'{"prompt":"x"}') == TokenCount(7, 4096)
    assert await engine.gauges() == EngineGauges(4, 2, 0.5)
    assert await engine.healthy()
    subject.set_health(False)
    assert not await engine.healthy()
