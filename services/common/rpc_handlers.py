"""Wrapping the handlers of RPC methods, whichever of the four shapes they have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


def wrap_handler(
    handler: Handler, wrap_call: Callable[[Any], Any], wrap_stream: Callable[[Any], Any]
) -> Handler:
    """The handler with its method wrapped.

    Args:
        handler: of one RPC method.
        wrap_call: wraps a coroutine function: a unary answer, or a stream that is
            written through the context, as the health service's Watch does.
        wrap_stream: wraps an asynchronous generator function.
    """
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
    wrap = wrap_stream if inspect.isasyncgenfunction(inner) else wrap_call
    return factory(
        wrap(inner),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
