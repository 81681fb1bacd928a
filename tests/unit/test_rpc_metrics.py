"""Calls are counted under their method and the status that the client saw."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvloop import rpc
from kvloop.errors import ConflictError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.common import rpc_server
from tests.flow.patience import HELD_UP_SECONDS


class _Ledger(ledger_pb2_grpc.LedgerServiceServicer):
    """Answers, fails or hangs, by method."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def TakeHandle(self, request, context):
        if request.request_id == "conflict":
            raise ConflictError("newer turn")
        if request.request_id == "defect":
            raise ValueError("a defect")
        return ledger_pb2.TakeHandleResponse()

    async def GetConversation(self, request, context):
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def WatchReleases(self, request, context):
        try:
            for revision in range(1, 4):
                yield ledger_pb2.WatchReleasesResponse(revision=revision)
            if request.worker_id == "stays":
                await asyncio.Event().wait()
        finally:
            self.ended.set()


@asynccontextmanager
async def _serving(registry: CollectorRegistry) -> AsyncIterator[tuple[_Ledger, Any]]:
    servicer = _Ledger()  # type: ignore[abstract]
    async with (
        rpc_server.serve(
            "127.0.0.1:0",
            lambda server: ledger_pb2_grpc.add_LedgerServiceServicer_to_server(servicer, server),
            [ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"]],
            grace_seconds=0,
            registry=registry,
        ) as port,
        rpc.open_channel(f"127.0.0.1:{port}") as channel,
    ):
        await channel.channel_ready()
        yield servicer, ledger_pb2_grpc.LedgerServiceStub(channel)


def _counted(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["method"], sample.labels["code"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "kvloop_rpc_seconds_count"
    }


@pytest.mark.parametrize(
    ("request_id", "code"), [("fine", "OK"), ("conflict", "ABORTED"), ("defect", "INTERNAL")]
)
async def test_a_call_counts_under_the_status_that_its_caller_sees(request_id, code) -> None:
    registry = CollectorRegistry()
    async with _serving(registry) as (_, stub):
        call = stub.TakeHandle(ledger_pb2.TakeHandleRequest(request_id=request_id))
        assert (await call.code()).name == code

    assert _counted(registry) == {("TakeHandle", code): 1}


async def test_a_stream_counts_once_when_it_ends() -> None:
    registry = CollectorRegistry()
    async with _serving(registry) as (_, stub):
        messages = stub.WatchReleases(ledger_pb2.WatchReleasesRequest())
        assert [message.revision async for message in messages] == [1, 2, 3]

    assert _counted(registry) == {("WatchReleases", "OK"): 1}


async def test_a_stream_that_its_client_leaves_counts_as_cancelled() -> None:
    registry = CollectorRegistry()
    async with _serving(registry) as (servicer, stub):
        call = stub.WatchReleases(ledger_pb2.WatchReleasesRequest(worker_id="stays"))
        assert (await call.read()).revision == 1
        call.cancel()
        await servicer.ended.wait()

    assert _counted(registry) == {("WatchReleases", "CANCELLED"): 1}


async def test_a_call_whose_time_is_up_counts_as_such() -> None:
    registry = CollectorRegistry()
    async with _serving(registry) as (servicer, stub):
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GetConversation(ledger_pb2.GetConversationRequest(), timeout=HELD_UP_SECONDS)
        await servicer.ended.wait()

    assert _counted(registry) == {("GetConversation", "DEADLINE_EXCEEDED"): 1}
