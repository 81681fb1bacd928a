"""Calls that are opened ahead answer as calls that are opened for a request do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest

from kvloop import rpc
from kvloop.errors import DeadlineError, UnavailableError
from services.router.spare_calls import SpareCall, StreamAhead, UnaryAhead
from tests.flow.router.fakes import eventually
from tests.free_ports import held_port

Context = grpc.aio.ServicerContext[Any, Any]

_ONE, _MANY = "/test.Echo/One", "/test.Echo/Many"


@dataclass
class Echo:
    """A server that says what it was told; a request "hang" is not answered."""

    opened: int = 0
    """Calls that were opened, with or without a request."""
    cancelled: list[bytes] = field(default_factory=list)
    seconds_left: list[float | None] = field(default_factory=list)
    port: int = field(default_factory=held_port)
    stop: Callable[[], Awaitable[None]] = field(init=False)

    async def one(self, request: bytes, context: Context) -> bytes:
        await self._hear(request, context)
        return request

    async def many(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield request
        await self._hear(request, context)
        yield request

    async def _hear(self, request: bytes, context: Context) -> None:
        self.seconds_left.append(context.time_remaining())
        if request == b"hang":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(request)
                raise
        if request == b"refuse":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


class _CountsOpened(grpc.aio.ServerInterceptor):
    def __init__(self, echo: Echo) -> None:
        self._echo = echo

    async def intercept_service(self, continuation, handler_call_details):
        self._echo.opened += 1
        return await continuation(handler_call_details)


@asynccontextmanager
async def _serve(echo: Echo, *, grace_seconds: float | None = None) -> AsyncIterator[Echo]:
    server = grpc.aio.server(interceptors=[_CountsOpened(echo)])
    methods: dict[str, Any] = {
        "One": grpc.unary_unary_rpc_method_handler(echo.one),
        "Many": grpc.unary_stream_rpc_method_handler(echo.many),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", methods)])
    server.add_insecure_port(f"127.0.0.1:{echo.port}")
    echo.stop = partial(server.stop, grace_seconds)
    await server.start()
    try:
        yield echo
    finally:
        await echo.stop()


Ask = Callable[[bytes, float], AsyncGenerator[bytes, None]]


@dataclass
class Method:
    """Either kind of method, called alike."""

    ask: Ask
    answers: int
    ahead: UnaryAhead[bytes, bytes] | StreamAhead[bytes, bytes]

    def close(self) -> None:
        self.ahead.close()

    def spare(self) -> SpareCall[Any]:
        return self.ahead._spare

    async def __call__(self, request: bytes, timeout_seconds: float = 10.0) -> list[bytes]:
        async with aclosing(self.ask(request, timeout_seconds)) as answers:
            return [answer async for answer in answers]


def _has_opened(echo: Echo, calls: int) -> bool:
    return echo.opened == calls


def _as_is(data: bytes) -> bytes:
    return data


def _method(kind: str, channel: grpc.aio.Channel) -> Method:
    if kind == "stream":
        many = StreamAhead(channel, _MANY, _as_is, _as_is)

        def ask_many(request: bytes, limit: float) -> AsyncGenerator[bytes, None]:
            return many(request, timeout_seconds=limit)

        return Method(ask_many, 2, many)
    one = UnaryAhead(channel, _ONE, _as_is, _as_is)

    async def ask(request: bytes, limit: float) -> AsyncGenerator[bytes, None]:
        yield await one(request, timeout_seconds=limit)

    return Method(ask, 1, one)


@pytest.fixture(params=["unary", "stream"])
def kind(request) -> str:
    return str(request.param)


async def _begin(channel: grpc.aio.Channel, method: Method, echo: Echo) -> None:
    """Make the first request; afterwards a call is open for the next."""
    await channel.channel_ready()  # none is opened where that takes long
    assert await method(b"first") == [b"first"] * method.answers
    await eventually(lambda: echo.opened == 2)


@asynccontextmanager
async def _connected(kind: str) -> AsyncIterator[tuple[Echo, Method]]:
    """A server and a method that has a call open."""
    async with _serve(Echo()) as echo, rpc.open_channel(f"127.0.0.1:{echo.port}") as channel:
        method = _method(kind, channel)
        await _begin(channel, method, echo)
        try:
            yield echo, method
        finally:
            method.close()


def _let_pass(seconds: float) -> None:
    """Set the clock of the loop ahead."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


async def test_after_the_first_request_a_call_is_open_for_the_next(kind) -> None:
    async with _connected(kind) as (echo, method):
        for number in range(3):
            assert await method(b"%d" % number) == [b"%d" % number] * method.answers
            await eventually(partial(_has_opened, echo, number + 3))
        assert echo.seconds_left[0] is not None
        assert echo.seconds_left[1:] == [None] * 3  # as calls that were opened ahead have it


async def test_requests_at_once_have_a_call_each(kind) -> None:
    async with _connected(kind) as (_, method):
        asked = [b"%d" % number for number in range(20)]
        answered = await asyncio.gather(*(method(request) for request in asked))
        assert answered == [[request] * method.answers for request in asked]


async def test_no_answer_in_time_is_a_deadline_error_and_ends_the_servers_work(kind) -> None:
    async with _connected(kind) as (echo, method), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(_error_of(method(b"hang", 60.0)))
        await eventually(lambda: len(echo.seconds_left) == 2)
        _let_pass(60.0)
        assert isinstance(await asking, DeadlineError)
        await eventually(lambda: echo.cancelled == [b"hang"])
        assert await method(b"next") == [b"next"] * method.answers


async def test_caller_that_is_cancelled_ends_the_servers_work(kind) -> None:
    async with _connected(kind) as (echo, method):
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(method(b"hang"))
            await eventually(lambda: len(echo.seconds_left) == 2)
            asking.cancel()
        assert asking.cancelled()
        await eventually(lambda: echo.cancelled == [b"hang"])


async def test_callers_timeout_beats_that_of_the_call(kind) -> None:
    async with _connected(kind) as (_, method):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await method(b"hang", 0.05)


async def test_status_of_the_server_is_the_callers(kind) -> None:
    async with _connected(kind) as (_, method):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"refuse")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "full"


async def test_call_that_broke_while_it_was_open_is_not_used(kind) -> None:
    echo = Echo()
    async with _serve(echo):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{echo.port}", options=rpc.OPTIONS)
        method = _method(kind, channel)
        await _begin(channel, method, echo)
    async with channel, _serve(echo):  # another life at the same address
        async with asyncio.timeout(20):
            await channel.channel_ready()
        assert await method(b"second") == [b"second"] * method.answers
        method.close()


async def test_connection_that_breaks_under_a_request_is_the_callers_error(kind) -> None:
    echo = Echo()
    async with asyncio.TaskGroup() as tasks:
        async with _serve(echo):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{echo.port}", options=rpc.OPTIONS)
            method = _method(kind, channel)
            await _begin(channel, method, echo)
            asking = tasks.create_task(_error_of(method(b"hang")))
            await eventually(lambda: len(echo.seconds_left) == 2)
    error = asking.result()
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    method.close()
    await channel.close()


async def _error_of(answer) -> Exception | None:
    try:
        await answer
    except Exception as error:
        return error
    return None


async def test_request_that_cannot_be_sent_is_unavailable() -> None:
    async with _serve(Echo()) as echo:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{echo.port}", options=rpc.OPTIONS)
        method = UnaryAhead(channel, _ONE, _as_is, _as_is)
        await channel.channel_ready()
        await method(b"first", timeout_seconds=5)
        await eventually(lambda: method._spare._call is not None)
        broken = method._spare._call
        assert broken is not None
        broken.write = _fails_to_write  # type: ignore[method-assign]
        with pytest.raises(UnavailableError):
            await method(b"second", timeout_seconds=5)
        method.close()
        await channel.close()


async def _fails_to_write(request: bytes) -> None:
    raise grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "failed to send"
    )


async def test_request_that_is_too_large_is_told_so(kind) -> None:
    options = [("grpc.max_send_message_length", 2 * 1024 * 1024)]
    async with (
        _serve(Echo()) as echo,
        grpc.aio.insecure_channel(f"127.0.0.1:{echo.port}", options=options) as channel,
    ):
        method = _method(kind, channel)
        await _begin(channel, method, echo)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(bytes(3 * 1024 * 1024))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        large = bytes(3 * 512 * 1024)
        assert await method(large) == [large] * method.answers
        assert await method(b"small") == [b"small"] * method.answers
        assert echo.seconds_left[-1] is None  # the call that was open all the time
        method.close()


async def test_deadline_that_passes_before_a_call_is_open_is_one(kind) -> None:
    async with _connected(kind) as (_, method):
        for _number in range(20):
            method.spare()._let_go()
            method.spare()._open()  # its opening has not gone out yet
            with suppress(DeadlineError):
                async with asyncio.timeout(5):
                    await method(b"now", 0.0002)


async def test_server_that_stops_is_not_held_up(kind) -> None:
    async with AsyncExitStack() as stack:
        echo = Echo()
        server = await stack.enter_async_context(_serve(echo, grace_seconds=60))
        channel = await stack.enter_async_context(rpc.open_channel(f"127.0.0.1:{server.port}"))
        method = _method(kind, channel)
        await _begin(channel, method, echo)
        async with asyncio.timeout(10):
            await echo.stop()
        method.close()


async def test_server_that_stops_waits_for_no_call_once_none_is_expected(kind) -> None:
    async with asyncio.timeout(10):
        async with _serve(Echo(), grace_seconds=60) as echo:
            async with rpc.open_channel(f"127.0.0.1:{echo.port}") as channel:
                method = _method(kind, channel)
                await _begin(channel, method, echo)
                method.close()
                assert await method(b"last") == [b"last"] * method.answers
                assert echo.opened == 3  # and none ahead


async def test_a_call_that_nobody_takes_is_given_up() -> None:
    async with _serve(Echo()) as echo, rpc.open_channel(f"127.0.0.1:{echo.port}") as channel:
        await channel.channel_ready()
        method = channel.stream_unary(_ONE, _as_is, _as_is)
        calls: list[grpc.aio.StreamUnaryCall[bytes, bytes]] = []

        def open_call() -> grpc.aio.StreamUnaryCall[bytes, bytes]:
            calls.append(method())
            return calls[-1]

        spare = SpareCall(
            channel, open_call, pause_seconds=0.0, look_seconds=0.01, max_age_seconds=0.05
        )
        for opened in (1, 2):
            spare.refill()
            await eventually(partial(_are_cancelled, calls, opened))
            assert spare.take() is None
        spare.close()
        spare.refill()
        await asyncio.sleep(0.02)
        assert len(calls) == 2


def _are_cancelled(calls: Sequence[grpc.aio.Call], count: int) -> bool:
    return len(calls) == count and all(call.cancelled() for call in calls)


async def test_nothing_is_opened_without_a_connection() -> None:
    async with rpc.open_channel("127.0.0.1:1") as channel:
        opened: list[None] = []
        spare = SpareCall(channel, lambda: opened.append(None), pause_seconds=0.0)  # type: ignore[type-var]
        spare.refill()
        await asyncio.sleep(0.01)
        assert (spare.take(), opened) == (None, [])
        spare.close()
