"""Requests in two parts over HTTP: what goes out, and what becomes of connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count

import pytest

from kvloop.errors import UnavailableError
from services.worker import http_replies
from services.worker.begun_request import HttpBegunRequest
from services.worker.engine import DONE, Api
from services.worker.engine_front import HEAD_HEADER
from services.worker.http_engine import HttpEngine, open_engine
from tests.unit.worker.awaits import CancelledAt
from tests.unit.worker.fake_vllm import BREAK, Answer, FakeVllm, error_body, fake_vllm, sse
from tests.unit.worker.fakes import until

CHAT = Api.CHAT_COMPLETIONS
HEAD, REST = b'{"a":1', b',"kv_transfer_params":{"b":2}}'
CONNECTIONS = 2


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with fake_vllm() as fake:
        fake.answers[CHAT] = Answer(steps=sse(b'{"a":1}'))
        yield fake


@pytest.fixture
async def engine(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpEngine]:
    """Its connections are kept, however busy the machine is."""
    monkeypatch.setattr(http_replies, "_DRAIN_SECONDS", 30)
    async with open_engine(
        vllm.url,
        max_connections=CONNECTIONS,
        connect_timeout_seconds=30,
        keep_alive_seconds=30,
    ) as engine:
        yield engine


async def _answer(begun: HttpBegunRequest, rest: bytes = REST) -> list[bytes]:
    assert await begun.finish(rest)
    async with begun.stream() as batches:
        return [payload async for batch in batches for payload in batch]


async def _all_connections_are_free(vllm: FakeVllm, engine: HttpEngine) -> None:
    """So many requests at once are answered, and the engine has no other."""
    async with asyncio.timeout(20):
        await until(lambda: vllm.open == 0)
        gate = asyncio.Event()
        vllm.answers[CHAT] = Answer(hold=gate)
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(engine.complete(CHAT, b"{}"))
            await until(lambda: vllm.open == CONNECTIONS)
            gate.set()


async def test_the_header_says_where_the_head_ends(vllm: FakeVllm, engine: HttpEngine) -> None:
    begun = engine.begin(CHAT, HEAD, {"traceparent": "00-1-2-01"})
    async with asyncio.TaskGroup() as group:
        group.create_task(begun.run())
        assert await _answer(begun) == [b'{"a":1}', DONE]
    headers = vllm.received[0].headers
    assert headers[HEAD_HEADER] == str(len(HEAD))
    assert headers["Transfer-Encoding"] == "chunked"
    assert headers["Content-Type"] == "application/json"
    assert headers["traceparent"] == "00-1-2-01"


async def test_requests_in_one_piece_say_where_their_last_brace_is(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    async with engine.stream(CHAT, HEAD + REST) as batches:
        assert [payload async for batch in batches for payload in batch]
    vllm.answers["/v1/completions"] = vllm.answers["/v1/responses"] = Answer()
    for api in (Api.COMPLETIONS, Api.RESPONSES):
        await engine.complete(api, b'{"a":1}')
    told = [received.headers[HEAD_HEADER] for received in vllm.received]
    assert told == [str(len(HEAD + REST) - 1), "6", "6"]


async def test_requests_that_have_no_params_say_nothing(vllm: FakeVllm, engine: HttpEngine) -> None:
    await engine.tokenize(b'{"prompt":"x"}')
    await engine.complete(Api.TOKENIZE, b'{"prompt":"x"}')
    assert all(HEAD_HEADER not in received.headers for received in vllm.received)


async def test_a_connection_is_kept_after_the_reply(vllm: FakeVllm, engine: HttpEngine) -> None:
    for _ in range(3):
        begun = engine.begin(CHAT, HEAD, {})
        async with asyncio.TaskGroup() as group:
            group.create_task(begun.run())
            await until(lambda: vllm.arriving)
            await _answer(begun)
            begun.close()
    assert len({id(received.connection) for received in vllm.received}) == 1


async def test_large_heads_arrive_whole(vllm: FakeVllm, engine: HttpEngine) -> None:
    head = b'{"prompt":"' + b"x" * 5_000_000 + b'"'
    begun = engine.begin(CHAT, head, {})
    async with asyncio.TaskGroup() as group:
        group.create_task(begun.run())
        await until(lambda: vllm.arriving and vllm.arriving[0].raw == head)
        await _answer(begun)
    assert vllm.received[0].raw == head + REST


async def test_an_engine_that_refuses_the_head_has_not_got_the_request(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    vllm.early[CHAT] = Answer(status=400, body=error_body("no", 400))
    begun = engine.begin(CHAT, HEAD, {})
    await begun.run()
    assert not await begun.finish(REST)
    vllm.early.clear()
    await _all_connections_are_free(vllm, engine)


async def test_an_engine_that_is_not_there_has_not_got_the_request() -> None:
    url = "http://127.0.0.1:1"
    async with open_engine(url, max_connections=1, connect_timeout_seconds=1) as engine:
        begun = engine.begin(CHAT, HEAD, {})
        async with asyncio.TaskGroup() as group:
            group.create_task(begun.run())
            # It is asked to go on before it knows.
            assert not await begun.finish(REST)


async def test_an_engine_that_breaks_off_after_the_rest_is_lost(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    vllm.answers[CHAT] = Answer(steps=[BREAK])
    begun = engine.begin(CHAT, HEAD, {})
    async with asyncio.TaskGroup() as group:
        group.create_task(begun.run())
        await until(lambda: vllm.arriving)
        with pytest.raises(UnavailableError) as caught:
            await _answer(begun)
    assert (caught.value.reason, caught.value.metadata["reached"]) == ("ENGINE_LOST", "true")


async def test_a_defect_does_not_end_whoever_runs_other_requests_too(engine: HttpEngine) -> None:
    begun = engine.begin(CHAT, HEAD, {"traceparent": "not\r\na: header"})
    await begun.run()
    assert not await begun.finish(REST)


async def test_a_request_waits_for_a_connection_with_its_rest(
    vllm: FakeVllm, engine: HttpEngine
) -> None:
    waiting = [engine.begin(CHAT, HEAD, {}) for _ in range(CONNECTIONS)]
    late = engine.begin(CHAT, HEAD, {})
    async with asyncio.TaskGroup() as group:
        for begun in (*waiting, late):
            group.create_task(begun.run())
        await until(lambda: len(vllm.arriving) == CONNECTIONS)
        finishing = group.create_task(_answer(late))
        for begun in waiting:
            begun.close()
        assert await finishing == [b'{"a":1}', DONE]


Way = Callable[[HttpBegunRequest], Awaitable[object]]


async def _streamed(begun: HttpBegunRequest) -> None:
    if await begun.finish(REST):
        async with begun.stream() as batches:
            async for _ in batches:
                pass


async def _in_one_piece(begun: HttpBegunRequest) -> None:
    if await begun.finish(REST):
        await begun.complete()


@pytest.mark.parametrize("way", [_streamed, _in_one_piece])
async def test_whoever_finishes_may_be_cancelled_at_any_await(
    vllm: FakeVllm, engine: HttpEngine, way: Way
) -> None:
    long = [b'{"a":"' + b"x" * 300_000 + b'"}'] * 3  # which is read in several steps
    for number in count():
        vllm.answers[CHAT] = Answer(steps=sse(*long))
        begun = engine.begin(CHAT, HEAD, {})

        async def finish(begun: HttpBegunRequest = begun) -> None:
            try:
                await way(begun)
            finally:
                begun.close()

        cancelled = CancelledAt(finish(), number)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(begun.run())
            group.create_task(cancelled.run())
        assert running.done()
        if not cancelled.reached:
            break
    assert number > 2
    await _all_connections_are_free(vllm, engine)


@pytest.mark.parametrize("ended_by", ["close", "cancel"])
async def test_a_request_may_be_given_up_at_every_step_of_the_loop(
    vllm: FakeVllm, engine: HttpEngine, ended_by: str
) -> None:
    """Connecting, sending, waiting for the reply, having it."""
    finished_in_time = 0
    first = 1 if ended_by == "cancel" else 0  # a task must have begun to see that it ends
    for steps in count(first):
        if steps >= 60 and finished_in_time:  # sockets may be slow
            break
        begun = engine.begin(CHAT, HEAD, {})
        async with asyncio.TaskGroup() as group:
            running = group.create_task(begun.run())
            finishing = group.create_task(_finished(begun))
            for _ in range(steps):
                await asyncio.sleep(0)
            running.cancel() if ended_by == "cancel" else begun.close()
            finished_in_time += await finishing
            begun.close()
    assert finished_in_time < 60
    await _all_connections_are_free(vllm, engine)


async def _finished(begun: HttpBegunRequest) -> bool:
    try:
        return await begun.finish(REST)
    except UnavailableError:
        return False
