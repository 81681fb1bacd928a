"""Errors raised below the gRPC edge reach the caller as the same class."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop import rpc
from kvloop.errors import (
    ConflictError,
    InternalError,
    InvalidFieldError,
    ModelNotFoundError,
    UnavailableError,
)
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.common import rpc_server
from services.common.rpc_health import Health


class _Ledger(ledger_pb2_grpc.LedgerServiceServicer):
    """Raises whatever the test asks for."""

    error: Exception = ValueError("secret detail")

    async def TakeHandle(self, request, context):
        raise self.error

    async def WatchReleases(self, request, context):
        yield ledger_pb2.WatchReleasesResponse(revision=1)
        raise self.error


async def _call(error: Exception) -> None:
    servicer = _Ledger()  # type: ignore[abstract]
    servicer.error = error
    async with (
        rpc_server.serve(
            "127.0.0.1:0",
            lambda server: ledger_pb2_grpc.add_LedgerServiceServicer_to_server(servicer, server),
            [ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"]],
            grace_seconds=0,
        ) as port,
        rpc.open_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        with rpc.typed_errors():
            await stub.TakeHandle(ledger_pb2.TakeHandleRequest())


@pytest.mark.parametrize(
    "error",
    [
        InvalidFieldError("messages is empty", field="messages"),
        ModelNotFoundError("no worker serves 'x'", model="x"),
        ConflictError("newer turn", reason="TURN_SUPERSEDED", turn=3),
        UnavailableError("draining", reason="DRAINING"),
    ],
)
async def test_error_class_reason_and_metadata_survive_the_wire(error) -> None:
    with pytest.raises(type(error)) as caught:
        await _call(error)
    assert caught.value.reason == error.reason
    assert caught.value.metadata == error.metadata
    assert caught.value.message == error.message


async def test_a_defect_becomes_internal_without_its_text() -> None:
    with pytest.raises(InternalError) as caught:
        await _call(ValueError("secret detail"))
    assert "secret" not in caught.value.message


async def test_error_after_the_first_stream_message_keeps_the_message() -> None:
    servicer = _Ledger()  # type: ignore[abstract]
    servicer.error = ConflictError("later")
    async with (
        rpc_server.serve(
            "127.0.0.1:0",
            lambda server: ledger_pb2_grpc.add_LedgerServiceServicer_to_server(servicer, server),
            [ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"]],
            grace_seconds=0,
        ) as port,
        rpc.open_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        messages = aiter(stub.WatchReleases(ledger_pb2.WatchReleasesRequest()))
        assert (await anext(messages)).revision == 1
        with pytest.raises(ConflictError), rpc.typed_errors():
            await anext(messages)


async def test_health_can_be_watched() -> None:
    async with (
        rpc_server.serve("127.0.0.1:0", lambda _: None, [], grace_seconds=0) as port,
        rpc.open_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
        status = await anext(aiter(watch))
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


_NAME = "kvloop.kvmeta.v1.LedgerService"


def _with_a_ledger(**options: Any) -> Any:
    return rpc_server.serve(
        "127.0.0.1:0",
        lambda _: None,
        [ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"]],
        grace_seconds=0,
        **options,
    )


async def _statuses(channel: grpc.aio.Channel) -> Mapping[str, str]:
    """What health says, by name."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    status = health_pb2.HealthCheckResponse.ServingStatus
    return {
        name: status.Name((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)
        for name in ("", _NAME)
    }


async def test_services_are_ready_from_the_start_unless_somebody_has_to_say_so() -> None:
    async with (
        _with_a_ledger() as port,
        rpc.open_channel(f"127.0.0.1:{port}") as channel,
    ):
        assert await _statuses(channel) == {"": "SERVING", _NAME: "SERVING"}


async def test_a_server_takes_calls_whose_service_is_not_ready_and_says_both() -> None:
    drain = rpc_server.Drain()
    async with (
        _with_a_ledger(drain=drain, ready=False) as port,
        rpc.open_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = aiter(stub.Watch(health_pb2.HealthCheckRequest(service=_NAME)))
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await _statuses(channel) == {"": "SERVING", _NAME: "NOT_SERVING"}

        drain.health.set_ready(True)

        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
        drain.health.set_ready(False)
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await _statuses(channel) == {"": "SERVING", _NAME: "NOT_SERVING"}


async def test_a_server_that_leaves_says_so_under_every_name_and_is_not_ready_again() -> None:
    looked = asyncio.Event()

    async def until_looked(seconds: float) -> None:
        await looked.wait()

    drain = rpc_server.Drain(1, sleep=until_looked)
    async with _with_a_ledger(drain=drain) as port:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(drain.run())
            async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
                await asyncio.sleep(0)
                drain.health.set_ready(True)
                said = await _statuses(channel)
            looked.set()
    assert said == {"": "NOT_SERVING", _NAME: "NOT_SERVING"}


async def test_a_watcher_that_reads_nothing_keeps_news_from_nobody_else() -> None:
    health = Health()
    health.begin([_NAME], ready=True)
    context: Any = None  # a watch asks nothing of it
    request = health_pb2.HealthCheckRequest(service=_NAME)
    stuck, other = health.Watch(request, context), health.Watch(request, context)
    status = health_pb2.HealthCheckResponse
    async with asyncio.timeout(10):
        assert (await anext(stuck)).status == status.SERVING  # and is held at that
        assert (await anext(other)).status == status.SERVING
        health.set_ready(False)
        assert (await anext(other)).status == status.NOT_SERVING
        health.set_ready(True)
        assert (await anext(other)).status == status.SERVING
        health.leave()
        assert (await anext(other)).status == status.NOT_SERVING
        assert (await anext(stuck)).status == status.NOT_SERVING


async def test_unreachable_peer_is_unavailable() -> None:
    async with rpc.open_channel("127.0.0.1:1") as channel:
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        with pytest.raises(UnavailableError), rpc.typed_errors():
            await stub.TakeHandle(ledger_pb2.TakeHandleRequest())


async def test_second_server_on_the_same_port_is_refused() -> None:
    def add(server: grpc.aio.Server) -> None:
        ledger_pb2_grpc.add_LedgerServiceServicer_to_server(
            _Ledger(),  # type: ignore[abstract]
            server,
        )

    async with rpc_server.serve("127.0.0.1:0", add, [], grace_seconds=0) as port:
        with pytest.raises(OSError, match="cannot listen"):
            async with rpc_server.serve(f"127.0.0.1:{port}", add, [], grace_seconds=0):
                pass
