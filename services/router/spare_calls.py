"""Calls that are opened before there is anything to say in them.

Half of the time that a request takes to another process goes into opening a call: at
either end tasks are made and threads woken up, before the message is read. A call's
message may follow its opening at any time, and a server cannot tell: on the wire, a call
with one message is a stream of one. So each method that lies on the way to the first
token has one call open, which takes the next request. See docs/adr/0065.

What a call says in its opening is fixed by then. So a spare call has no deadline that its
server knows of, whoever takes it cancels it, and the trace context stands in the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from contextvars import Context
from typing import Any, Generic, TypeVar

import grpc

from kvloop.errors import DeadlineError, UnavailableError

_PAUSE_SECONDS = 0.05
"""From a request to the opening of the next call, which would be in its way at either end.
Requests that follow faster meet threads that are awake."""
_LOOK_SECONDS = 1.0
"""From one look at the connection to the next: a server that stops waits for its calls."""
_MAX_AGE_SECONDS = 20.0
"""A spare call that nobody takes is given up. It keeps memory and tasks at either end, and
its connection, which may be one that calls shall leave: its certificate has been replaced."""
_LARGEST_BYTES = 1024 * 1024
"""Larger requests have a call of their own, which tells why it failed if they cannot be sent."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_UnaryCall = grpc.aio.StreamUnaryCall[_Request, _Response]
_StreamCall = grpc.aio.StreamStreamCall[_Request, _Response]
_SendingCall = grpc.aio.StreamUnaryCall[bytes, Any] | grpc.aio.StreamStreamCall[bytes, Any]
_Call = TypeVar("_Call", bound=grpc.aio.Call)


class SpareCall(Generic[_Call]):
    """One call of a method, open for the next request.

    Args:
        channel: where it is opened, if it is connected then.
        open_call: opens a call.
        pause_seconds: it is opened so long after it was asked for.
        look_seconds: how often it is given up if the connection has gone.
        max_age_seconds: it is given up after that time.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        open_call: Callable[[], _Call],
        *,
        pause_seconds: float = _PAUSE_SECONDS,
        look_seconds: float = _LOOK_SECONDS,
        max_age_seconds: float = _MAX_AGE_SECONDS,
    ) -> None:
        self._channel = channel
        self._open_call = open_call
        self._pause_seconds = pause_seconds
        self._look_seconds = look_seconds
        self._max_age_seconds = max_age_seconds
        self._loop = asyncio.get_running_loop()
        self._call: _Call | None = None
        self._opened_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self) -> _Call | None:
        """The call, if there is one that has not ended. It is the caller's from now on."""
        if self._call is None:
            return None
        call = self._let_go()
        return call if call is not None and not call.done() else None

    def refill(self) -> None:
        """Have a call for the next request soon, if there is none, and a connection."""
        if self._timer is None and not self._closed:
            self._start_timer(self._pause_seconds, self._open)

    def close(self) -> None:
        """Open none any more, and give up the one that is open."""
        self._closed = True
        call = self._let_go()
        if call is not None:
            call.cancel()

    def _let_go(self) -> _Call | None:
        call, self._call = self._call, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return call

    def _open(self) -> None:
        self._timer = None
        if self._connected():
            self._call, self._opened_at = self._open_call(), self._loop.time()
            self._start_timer(self._look_seconds, self._look)

    def _look(self) -> None:
        old = self._loop.time() >= self._opened_at + self._max_age_seconds
        if self._connected() and not old:
            self._start_timer(self._look_seconds, self._look)
        elif (call := self._let_go()) is not None:
            call.cancel()  # without effect on a call that has ended

    def _connected(self) -> bool:
        # No more as soon as the server says that it stops.
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        # Whose request was the last is of no concern to what is opened for the next.
        self._timer = self._loop.call_later(seconds, callback, context=Context())


class _Ahead(Generic[_Request, _Call]):
    """A method of which a call is kept open. Each request takes that call if it can.

    Args:
        spare: the call.
        serialize: makes bytes of a request.
    """

    def __init__(self, spare: SpareCall[_Call], serialize: Callable[[_Request], bytes]) -> None:
        self._spare = spare
        self._serialize = serialize

    def close(self) -> None:
        """No further calls will come: hold none ready."""
        self._spare.close()

    def _take(self, data: bytes) -> _Call | None:
        """The spare call, if it may have the request; the next one is on its way."""
        call = self._spare.take() if len(data) <= _LARGEST_BYTES else None
        self._spare.refill()
        return call


class UnaryAhead(_Ahead[_Request, _UnaryCall[bytes, _Response]], Generic[_Request, _Response]):
    """A method with one answer.

    Args:
        channel: to the server.
        method: full name, as in /package.Service/Method.
        serialize: makes bytes of a request.
        deserialize: reads an answer.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        method: str,
        serialize: Callable[[_Request], bytes],
        deserialize: Callable[[bytes], _Response],
    ) -> None:
        open_call = channel.stream_unary(method, _as_it_is, deserialize)
        super().__init__(SpareCall(channel, open_call), serialize)
        self._call_now = channel.unary_unary(method, _as_it_is, deserialize)

    async def __call__(self, request: _Request, *, timeout_seconds: float) -> _Response:
        """Send a request and wait for its answer.

        Raises:
            DeadlineError: there was none in time.
            UnavailableError: the connection broke before the request was sent.
            grpc.aio.AioRpcError: the call failed.
        """
        data = self._serialize(request)
        call = self._take(data)
        if call is None:
            return await self._call_now(data, timeout=timeout_seconds)
        try:
            async with asyncio.timeout(timeout_seconds):
                await _send(call, data)
                return await call
        except TimeoutError:
            raise _too_late() from None
        finally:
            call.cancel()  # without effect on a call that has ended


class StreamAhead(_Ahead[_Request, _StreamCall[bytes, _Response]], Generic[_Request, _Response]):
    """As `UnaryAhead`, for a method that answers with a stream."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        method: str,
        serialize: Callable[[_Request], bytes],
        deserialize: Callable[[bytes], _Response],
    ) -> None:
        open_call = channel.stream_stream(method, _as_it_is, deserialize)
        super().__init__(SpareCall(channel, open_call), serialize)
        self._call_now = channel.unary_stream(method, _as_it_is, deserialize)

    async def __call__(
        self, request: _Request, *, timeout_seconds: float
    ) -> AsyncGenerator[_Response, None]:
        """Send a request; its answer, which has to end within the timeout.

        Closing the generator cancels the call. Raises as `UnaryAhead` does.
        """
        data = self._serialize(request)
        taken = self._take(data)
        if taken is not None:
            async with aclosing(self._ask(taken, data, timeout_seconds)) as responses:
                async for response in responses:
                    yield response
            return
        call = self._call_now(data, timeout=timeout_seconds)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()  # without effect on a call that has ended

    async def _ask(
        self, call: _StreamCall[bytes, _Response], data: bytes, timeout_seconds: float
    ) -> AsyncGenerator[_Response, None]:
        loop = asyncio.get_running_loop()
        ends, late = loop.time() + timeout_seconds, False

        def give_up() -> None:
            nonlocal late
            late = call.cancel()

        limit: asyncio.TimerHandle | None = None
        try:
            # A call that is cancelled before its opening went out would never be sent.
            async with asyncio.timeout_at(ends):
                await _send(call, data)
            limit = loop.call_at(ends, give_up)
            async for response in call:
                yield response
        except TimeoutError:
            raise _too_late() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if late and not (task is not None and task.cancelling()):
                raise _too_late() from None
            raise
        finally:
            if limit is not None:
                limit.cancel()
            call.cancel()


def _as_it_is(data: bytes) -> bytes:
    return data


async def _send(call: _SendingCall, data: bytes) -> None:
    try:
        await call.write(data)
    except grpc.aio.AioRpcError as error:
        # gRPC says INTERNAL here, whatever ended the call.
        raise UnavailableError("the connection broke") from error
    with suppress(grpc.aio.InternalError):  # the call has ended, and says itself how
        await call.done_writing()


def _too_late() -> DeadlineError:
    return DeadlineError("there was no answer in time")
