"""What grpcurl does, on every service: list, describe and call by reflection alone.

Nothing of our generated code is used: a pool of its own learns each message from
the server that is asked.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.flow.gateway.fleet import Fleet, fleet
from tests.flow.sim.engines import MODEL

_Result = TypeVar("_Result")
ROUTER = "kvloop.router.v1.RouterService"
STANDARD = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


class Grpcurl:
    """Speaks to one server without knowing its protos."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self._database)

    def services(self) -> set[str]:
        """Names of the services."""
        return set(self._database.get_services())

    def describe(self, service: str) -> dict[str, Any]:
        """Descriptors of the methods by name."""
        return dict(self._pool.FindServiceByName(service).methods_by_name)

    def call(self, service: str, method: str, **fields: Any) -> list[dict[str, Any]]:
        """Every response as JSON; one, unless the method streams."""
        found = self.describe(service)[method]
        request = json_format.ParseDict(fields, GetMessageClass(found.input_type)())
        response = GetMessageClass(found.output_type)
        shape: Any = self._channel.unary_unary
        if found.server_streaming:
            shape = self._channel.unary_stream
        answered = shape(
            f"/{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )(request, timeout=20)
        several = answered if found.server_streaming else [answered]
        return [json_format.MessageToDict(one) for one in several]


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as running:
        yield running


async def _with(address: str, work: Callable[[Grpcurl], _Result]) -> _Result:
    def run() -> _Result:
        with grpc.insecure_channel(address) as channel:
            return work(Grpcurl(channel))

    return await asyncio.to_thread(run)


def _router(stack: Fleet) -> str:
    return f"127.0.0.1:{stack.router.port}"


def _kvmeta(stack: Fleet) -> str:
    return f"127.0.0.1:{stack.kvmeta.port}"


def _text(chunks: list[dict[str, Any]]) -> str:
    """The answer in the chunks of a Chat or Generate stream."""
    events = [json.loads(base64.b64decode(event["chunk"]["json"])) for event in chunks]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for event in events
        for choice in event["choices"]
    )


async def test_every_service_lists_and_describes_itself(stack: Fleet) -> None:
    (worker, *_) = stack.router.pool.models()[0].decode
    for address, services in (
        (_router(stack), {ROUTER}),
        (_kvmeta(stack), {"kvloop.kvmeta.v1.LedgerService", "kvloop.kvmeta.v1.RegistryService"}),
        (worker.address, {"kvloop.worker.v1.WorkerService"}),
    ):
        assert await _with(address, lambda curl: curl.services()) == services | STANDARD
        for service in services:
            described = await _with(address, partial(Grpcurl.describe, service=service))
            assert described


async def test_health_is_called_by_reflection_on_every_service(stack: Fleet) -> None:
    (worker, *_) = stack.router.pool.models()[0].decode
    for address in (_router(stack), _kvmeta(stack), worker.address):
        (told,) = await _with(address, lambda curl: curl.call("grpc.health.v1.Health", "Check"))
        assert told == {"status": "SERVING"}


async def test_models_and_turns_are_called_by_reflection(stack: Fleet) -> None:
    (models,) = await _with(_router(stack), lambda curl: curl.call(ROUTER, "ListModels"))
    assert [model["name"] for model in models["models"]] == [MODEL]
    *chunks, last = await _with(
        _router(stack),
        lambda curl: curl.call(
            ROUTER,
            "Chat",
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            sampling={"max_tokens": 5},
            conversation_id="c",
        ),
    )
    assert _text(chunks)
    assert last["result"]["usage"]["completionTokens"] == 5
    assert last["result"]["receipt"]["retainOutcome"] == "RETAIN_OUTCOME_RETAINED"
    *chunks, last = await _with(
        _router(stack),
        lambda curl: curl.call(
            ROUTER, "Generate", model=MODEL, text="hello", sampling={"max_tokens": 5}
        ),
    )
    assert _text(chunks)
    assert last["result"]["usage"]["completionTokens"] == 5


async def test_queries_of_ledger_and_worker_are_called_by_reflection(stack: Fleet) -> None:
    (worker, *_) = stack.router.pool.models()[0].decode
    (listed,) = await _with(
        _kvmeta(stack), lambda curl: curl.call("kvloop.kvmeta.v1.RegistryService", "ListWorkers")
    )
    assert len(listed["workers"]) == 2
    (info,) = await _with(
        worker.address,
        lambda curl: curl.call("kvloop.worker.v1.WorkerService", "GetWorkerInfo"),
    )
    assert info["worker"]["workerId"] == worker.worker_id


async def test_an_error_has_details_that_reflection_users_can_read(stack: Fleet) -> None:
    def call(curl: Grpcurl) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            curl.call(ROUTER, "Chat", model="other", messages=[{"role": "user", "content": "x"}])
        failed: Any = caught.value
        trailers = dict(failed.trailing_metadata())
        assert b"MODEL_NOT_FOUND" in trailers["grpc-status-details-bin"]
        return str(failed.code())

    assert await _with(_router(stack), call) == "StatusCode.NOT_FOUND"
