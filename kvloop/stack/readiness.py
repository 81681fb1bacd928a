"""When a process, and the stack as a whole, can be used."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2

from kvloop.aio import AsyncClient
from kvloop.errors import KvloopError

_CALL_TIMEOUT_SECONDS = 2.0


async def is_serving(channel: grpc.aio.Channel) -> bool:
    """True if the gRPC server at the other end reports SERVING."""
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        response = await check(health_pb2.HealthCheckRequest(), timeout=_CALL_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def lists_model(client: AsyncClient, model: str, prefill: int, decode: int) -> bool:
    """True if the router can use this many workers of each role for the model."""
    try:
        models = await client.models()
    except KvloopError:
        return False
    return any(
        found.name == model and found.prefill_workers >= prefill and found.decode_workers >= decode
        for found in models
    )
