"""Spans for the calls that a gRPC server answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc

from services.common.rpc_handlers import wrap_handler
from services.common.tracing import NoTracing, Tracing, carried, running

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class SpanInterceptor(grpc.aio.ServerInterceptor):
    """Makes a span for each call of some methods, within the caller's trace.

    It stands inside the interceptor that turns errors into a status, so that it
    sees their reasons.

    Args:
        tracing: where spans begin.
        names: of spans, by the method's name without its service. Other methods get
            none, above all streams that run as long as their client.
    """

    def __init__(self, tracing: Tracing, names: Mapping[str, str]) -> None:
        self._tracing = tracing
        self._names = names

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the method's handler if it gets spans."""
        handler = await continuation(handler_call_details)
        name = self._names.get(handler_call_details.method.rpartition("/")[2])
        if handler is None or name is None:
            return handler
        return wrap_handler(
            handler,
            lambda inner: self._wrap_call(name, inner),
            lambda inner: self._wrap_stream(name, inner),
        )

    def _wrap_call(self, name: str, inner: Any) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            headers = carried(context.invocation_metadata() or ())
            with running(self._tracing.server_span(name, headers)):
                return await inner(request, context)

        return call

    def _wrap_stream(self, name: str, inner: Any) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            headers = carried(context.invocation_metadata() or ())
            with running(self._tracing.server_span(name, headers)):
                async with aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        yield response

        return call


def span_interceptors(
    tracing: Tracing, names: Mapping[str, str]
) -> Sequence[grpc.aio.ServerInterceptor]:
    """Interceptors for a server; none where nothing is traced."""
    return [] if isinstance(tracing, NoTracing) else [SpanInterceptor(tracing, names)]
