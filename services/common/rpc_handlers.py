"""Running something around every call of a server, whichever shape its method has."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

Context = grpc.aio.ServicerContext[Any, Any]

Around = Callable[[Context, Any], AbstractAsyncContextManager[None]]
"""What a call runs inside of, by its context and its request (an iterator of them, if it
streams them). It sees what the method raises; it may raise before."""

AroundMethod = Callable[[str], Around | None]
"""What calls of a method run inside of, by its full name as in
/package.Service/Method; None for nothing."""


class AroundInterceptor(grpc.aio.ServerInterceptor):
    """Runs every call of a server inside of blocks.

    Args:
        blocks: of each method, outermost first.
    """

    def __init__(self, blocks: Sequence[AroundMethod]) -> None:
        self._blocks = blocks
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the method's handler; once, as methods do not change."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is not None and known[0] is handler:
            return known[1]
        wrapped = handler
        for block in reversed(self._blocks):
            around = block(method)
            if around is not None:
                wrapped = _wrap(wrapped, around)
        self._wrapped[method] = (handler, wrapped)
        return wrapped


def _wrap(handler: Handler, around: Around) -> Handler:
    if handler.response_streaming:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        factory = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )
    else:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        factory = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
    # A stream may also be written through the context, by a coroutine, as the health
    # service's Watch is.
    wrap = _wrap_stream if inspect.isasyncgenfunction(inner) else _wrap_call
    return factory(
        wrap(inner, around),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _wrap_call(inner: Any, around: Around) -> Any:
    async def call(request: Any, context: Context) -> Any:
        async with around(context, request):
            return await inner(request, context)

    return call


def _wrap_stream(inner: Any, around: Around) -> Any:
    async def call(request: Any, context: Context) -> Any:
        async with around(context, request), aclosing(inner(request, context)) as responses:
            async for response in responses:
                yield response

    return call
