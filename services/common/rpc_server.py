"""The gRPC server that every service runs: error mapping, health, reflection."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from kvloop import rpc
from kvloop.errors import InternalError, KvloopError, to_status

_log = structlog.get_logger(__name__)

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns raised errors into a status; the only place that aborts a call.

    A KvloopError becomes its own status with ErrorInfo. Anything else is a
    defect: the caller gets INTERNAL with a fixed text, the log the traceback.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the method's handler, whichever of the four shapes it has."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            factory = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            wrapped = _wrap_stream(method, inner)
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            factory = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            wrapped = _wrap_unary(method, inner)
        return factory(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _wrap_unary(method: str, inner: Any) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort(method, context, error)

    return call


def _wrap_stream(method: str, inner: Any) -> Any:
    if not inspect.isasyncgenfunction(inner):
        # Writes through the context, as the health service's Watch does.
        return _wrap_unary(method, inner)

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response
        except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
            raise
        except Exception as error:
            await _abort(method, context, error)

    return call


async def _abort(
    method: str, context: grpc.aio.ServicerContext[Any, Any], error: Exception
) -> NoReturn:
    if not isinstance(error, KvloopError):
        _log.exception("rpc_failed", method=method, exc_info=error)
        error = InternalError("internal error; the service's log has the details")
    await context.abort_with_status(rpc_status.to_status(to_status(error)))


@asynccontextmanager
async def serve(
    address: str,
    add_services: Callable[[grpc.aio.Server], None],
    services: Sequence[ServiceDescriptor],
    *,
    grace_seconds: float,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[int]:
    """Run a gRPC server while the block runs.

    Health is SERVING inside the block and NOT_SERVING before the server stops;
    calls in flight then get grace_seconds to finish.

    Args:
        address: host:port to listen on; port 0 takes a free one.
        add_services: registers the servicers.
        services: descriptors of those services, for health and reflection.
        grace_seconds: time for calls in flight at the end.
        credentials: for TLS; without them nothing is encrypted.

    Yields:
        The port.

    Raises:
        OSError: the address cannot be bound.
    """
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor()],
        options=[
            *rpc.OPTIONS,
            ("grpc.so_reuseport", 0),
            # By default gRPC cancels calls at random once 1000 wait to be accepted.
            ("grpc.server.max_pending_requests", 20_000),
            ("grpc.server.max_pending_requests_hard_limit", 40_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ],
    )
    add_services(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = [service.full_name for service in services]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    try:
        port = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    await server.start()
    try:
        for name in ["", *names]:
            await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        yield port
    finally:
        await health_servicer.enter_graceful_shutdown()
        await server.stop(grace_seconds)
