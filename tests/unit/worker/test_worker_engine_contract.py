"""One suite for every engine: the fake one, and vLLM over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
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
from services.worker.engine import (
    DONE,
    Api,
    BegunRequest,
    Engine,
    EngineGauges,
    EngineModel,
    TokenCount,
)
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
    hold: Callable[[], asyncio.Event]
    """Let the scripted reply begin only when the event is set."""
    head: Callable[[], bytes]
    """What the engine has of a request that is not whole yet."""
    bodies: Callable[[], list[bytes]]
    """Whole bodies that the engine has got."""
    cut: Callable[[], None]
    """Cut the connection of the request that is not whole yet."""
    connections: Callable[[], int]
    """Requests that the engine has, whole or not, and has not answered."""


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

    def hold() -> asyncio.Event:
        engine.answers.clear()
        return engine.answers

    return Subject(
        engine,
        reply,
        stream,
        lambda: engine.aborted > 0,
        set_health,
        hold,
        lambda: b"".join(begun.head for begun in engine.begun if begun.connected),
        lambda: engine.raw_bodies,
        lambda: engine.begun[-1].break_off(),
        lambda: engine.connections,
    )


@pytest.fixture(params=["fake", "http"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "fake":
        yield _fake()
        return
    async with (
        fake_vllm() as vllm,
        open_engine(vllm.url, max_connections=10, connect_timeout_seconds=30) as engine,
    ):

        def reply(status: int, body: bytes) -> None:
            vllm.answers[CHAT] = Answer(status=status, body=body)

        def stream(steps: Sequence[bytes | asyncio.Event], whole: bool) -> None:
            framed: list[object] = [
                b"data: " + step + b"\n\n" if isinstance(step, bytes) else step for step in steps
            ]
            framed.append(b"data: [DONE]\n\n" if whole else BREAK)
            vllm.answers[CHAT] = Answer(steps=framed)

        def hold() -> asyncio.Event:
            held = vllm.answers[CHAT].hold = asyncio.Event()
            return held

        yield Subject(
            engine,
            reply,
            stream,
            lambda: vllm.received[-1].disconnected.is_set(),
            lambda healthy: setattr(vllm, "healthy", healthy),
            hold,
            lambda: b"".join(arriving.raw for arriving in vllm.arriving),
            lambda: [received.raw for received in vllm.requests(CHAT)],
            lambda: vllm.arriving[-1].cut(),
            lambda: vllm.open,
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


HEAD, REST = b'{"a":1', b',"b":2}'


@asynccontextmanager
async def _begun(subject: Subject) -> AsyncIterator[BegunRequest]:
    """A request of which the engine has the head; closed at the end."""
    begun = subject.engine.begin(CHAT, HEAD, {})
    async with asyncio.TaskGroup() as group:
        group.create_task(begun.run())
        await until(lambda: subject.head() == HEAD)
        try:
            yield begun
        finally:
            begun.close()


async def test_a_request_in_two_parts_arrives_whole_and_streams_its_reply(
    subject: Subject,
) -> None:
    subject.stream([b'{"a":1}', b'{"b":2}'], True)
    async with _begun(subject) as begun:
        assert subject.bodies() == []
        assert await begun.finish(REST)
        assert subject.bodies() == [HEAD + REST]
        async with begun.stream() as batches:
            found = [payload async for batch in batches for payload in batch]
    assert found == [b'{"a":1}', b'{"b":2}', DONE]
    assert not subject.aborted()


async def test_a_request_in_two_parts_has_a_whole_reply(subject: Subject) -> None:
    subject.reply(200, b'{ "a":1.0 }')
    async with _begun(subject) as begun:
        assert await begun.finish(REST)
        assert await begun.complete() == b'{ "a":1.0 }'


async def test_errors_in_reply_to_both_parts_are_typed(subject: Subject) -> None:
    for read in (_whole, _first_event):
        subject.reply(400, error_body("bad", 400))
        async with _begun(subject) as begun:
            assert await begun.finish(REST)
            with pytest.raises(InvalidFieldError):
                await read(begun)


async def _whole(begun: BegunRequest) -> bytes:
    return await begun.complete()


async def _first_event(begun: BegunRequest) -> bytes:
    async with begun.stream() as batches:
        return (await anext(batches))[0]


async def test_a_connection_that_broke_before_the_rest_is_told_and_not_raised(
    subject: Subject,
) -> None:
    begun = subject.engine.begin(CHAT, HEAD, {})
    async with asyncio.TaskGroup() as group:
        running = group.create_task(begun.run())
        await until(lambda: subject.head() == HEAD)
        subject.cut()
        await running
        assert not await begun.finish(REST)
    assert (subject.bodies(), subject.connections()) == ([], 0)


async def test_giving_a_request_up_closes_its_connection(subject: Subject) -> None:
    async with _begun(subject) as begun:
        begun.close()
        begun.close()
        await until(lambda: subject.connections() == 0)
    assert subject.bodies() == []


async def test_a_request_that_is_given_up_before_it_runs_never_goes_out(
    subject: Subject,
) -> None:
    begun = subject.engine.begin(CHAT, HEAD, {})
    begun.close()
    await begun.run()
    assert (subject.head(), subject.connections()) == (b"", 0)


async def test_cancelling_whoever_runs_a_request_closes_its_connection(subject: Subject) -> None:
    begun = subject.engine.begin(CHAT, HEAD, {})
    async with asyncio.TaskGroup() as group:
        running = group.create_task(begun.run())
        await until(lambda: subject.head() == HEAD)
        running.cancel()
    await until(lambda: subject.connections() == 0)
    assert not await begun.finish(REST)


async def test_cancelling_whoever_finishes_a_request_aborts_it(subject: Subject) -> None:
    subject.stream([b'{"a":1}'], True)
    subject.hold()
    async with _begun(subject) as begun, asyncio.TaskGroup() as group:
        finishing = group.create_task(begun.finish(REST))
        await until(subject.bodies)
        finishing.cancel()
        await until(subject.aborted)
    await until(lambda: subject.connections() == 0)


async def test_leaving_the_reply_to_both_parts_early_aborts_the_request(subject: Subject) -> None:
    subject.stream([b'{"a":1}', asyncio.Event()], True)
    async with _begun(subject) as begun:
        assert await begun.finish(REST)
        async with begun.stream() as batches:
            await anext(batches)
        await until(subject.aborted)


async def test_a_run_that_is_cut_off_after_the_rest_loses_the_request(subject: Subject) -> None:
    """The engine may have begun: nobody must send it again."""
    subject.stream([b'{"a":1}'], True)
    subject.hold()
    begun = subject.engine.begin(CHAT, HEAD, {})
    async with asyncio.TaskGroup() as group:
        running = group.create_task(begun.run())
        finishing = group.create_task(_reason_of(begun))
        await until(subject.bodies)
        running.cancel()
    assert await finishing == "ENGINE_LOST"


async def _reason_of(begun: BegunRequest) -> str:
    with pytest.raises(UnavailableError) as caught:
        await begun.finish(REST)
    return caught.value.reason
