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
from typing import Any, Generic, TypeVar

import grpc

from kvloop.errors import DeadlineError, UnavailableError

_PAUSE_SECONDS = 0.05
"""From a request to the opening of the next call, which would be in its way at either end.
Requests that follow faster meet threads that are awake."""
_MAX_AGE_SECONDS = 60.0
"""A spare call holds its connection, which may be one that calls shall leave: its
certificate has been replaced, say."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_UnaryCall = grpc.aio.StreamUnaryCall[_Request, _Response]
_StreamCall = grpc.aio.StreamStreamCall[_Request, _Response]
_SendingCall = grpc.aio.StreamUnaryCall[_Request, Any] | grpc.aio.StreamStreamCall[_Request, Any]
_Call = TypeVar("_Call", bound=grpc.aio.Call)


class SpareCall(Generic[_Call]):
    """One call of a method, open for the next request.

    Args:
        channel: where it is opened, if it is connected then.
        open_call: opens a call.
        pause_seconds: it is opened so long after it was asked for.
        max_age_seconds: it is opened anew after that time.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        open_call: Callable[[], _Call],
        *,
        pause_seconds: float = _PAUSE_SECONDS,
        max_age_seconds: float = _MAX_AGE_SECONDS,
    ) -> None:
        self._channel = channel
        self._open_call = open_call
        self._pause_seconds = pause_seconds
        self._max_age_seconds = max_age_seconds
        self._call: _Call | None = None
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
        if self._channel.get_state() is grpc.ChannelConnectivity.READY:
            self._call = self._open_call()
            self._start_timer(self._max_age_seconds, self._renew)

    def _renew(self) -> None:
        call = self._let_go()
        if call is not None and not call.done():
            call.cancel()
            self._open()

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, callback)


class UnaryAhead(Generic[_Request, _Response]):
    """A method with one answer. Each call of it takes the spare one if it can.

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
        self._call_now = channel.unary_unary(method, serialize, deserialize)
        self._spare = SpareCall(channel, channel.stream_unary(method, serialize, deserialize))

    async def __call__(self, request: _Request, *, timeout_seconds: float) -> _Response:
        """Send a request and wait for its answer.

        Raises:
            DeadlineError: there was none in time.
            UnavailableError: the connection broke before the request was sent.
            grpc.aio.AioRpcError: the call failed.
        """
        call = self._spare.take()
        if call is None:
            answer = await self._call_now(request, timeout=timeout_seconds)
            self._spare.refill()
            return answer
        try:
            async with asyncio.timeout(timeout_seconds):
                await _send(self._spare, call, request)
                return await call
        except TimeoutError:
            raise _too_late() from None
        finally:
            call.cancel()  # without effect on a call that has ended

    def close(self) -> None:
        """No further calls will come: hold none ready."""
        self._spare.close()


class StreamAhead(Generic[_Request, _Response]):
    """As `UnaryAhead`, for a method that answers with a stream."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        method: str,
        serialize: Callable[[_Request], bytes],
        deserialize: Callable[[bytes], _Response],
    ) -> None:
        self._call_now = channel.unary_stream(method, serialize, deserialize)
        self._spare = SpareCall(channel, channel.stream_stream(method, serialize, deserialize))

    async def __call__(
        self, request: _Request, *, timeout_seconds: float
    ) -> AsyncGenerator[_Response, None]:
        """Send a request; its answer, which has to end within the timeout.

        Closing the generator cancels the call. Raises as `UnaryAhead` does.
        """
        taken = self._spare.take()
        if taken is not None:
            async with aclosing(self._ask(taken, request, timeout_seconds)) as responses:
                async for response in responses:
                    yield response
            return
        call = self._call_now(request, timeout=timeout_seconds)
        try:
            async for response in call:
                self._spare.refill()
                yield response
        finally:
            call.cancel()  # without effect on a call that has ended

    async def _ask(
        self, call: _StreamCall[_Request, _Response], request: _Request, timeout_seconds: float
    ) -> AsyncGenerator[_Response, None]:
        late = False

        def give_up() -> None:
            nonlocal late
            late = call.cancel()

        limit = asyncio.get_running_loop().call_later(timeout_seconds, give_up)
        try:
            await _send(self._spare, call, request)
            async for response in call:
                yield response
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if late and not (task is not None and task.cancelling()):
                raise _too_late() from None
            raise
        finally:
            limit.cancel()
            call.cancel()

    def close(self) -> None:
        """See `UnaryAhead.close`."""
        self._spare.close()


async def _send(spare: SpareCall[Any], call: _SendingCall[_Request], request: _Request) -> None:
    try:
        await call.write(request)
    except grpc.aio.AioRpcError as error:
        # gRPC says INTERNAL here, whatever ended the call.
        raise UnavailableError("the connection broke") from error
    spare.refill()
    with suppress(grpc.aio.InternalError):  # the call has ended, and says itself how
        await call.done_writing()


def _too_late() -> DeadlineError:
    return DeadlineError("there was no answer in time")
