"""Watches of kvmeta that are opened anew again and again miss nothing and repeat nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc, registry_pb2
from services.common import long_streams
from services.kvmeta import app as kvmeta_app
from services.kvmeta.settings import KvmetaSettings
from services.router.registry import GrpcRegistry
from services.worker.ledger import Commit, Conversation, GrpcLedger
from services.worker.releases import GrpcReleaseFeed
from tests.flow.worker.registered import register_decode
from tests.unit.worker.fakes import ENGINE, PARAMS

_WORKER = "decode-0"
_SHORT_WHILE = 0.03
_SETTINGS = KvmetaSettings(listen="127.0.0.1:0", database_url="memory:")


@pytest.fixture
def short_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_streams, "LONGEST_SECONDS", _SHORT_WHILE)


@asynccontextmanager
async def _kvmeta() -> AsyncIterator[grpc.aio.Channel]:
    async with (
        kvmeta_app.build(_SETTINGS) as kvmeta,
        rpc.open_channel(f"127.0.0.1:{kvmeta.port}") as channel,
    ):
        yield channel


async def _leave_and_end(channel: grpc.aio.Channel, name: str) -> None:
    """A turn that leaves a handle behind, and the end of its conversation."""
    commit = Commit(
        conversation=Conversation("acme", "tiny", name, turn=0),
        turn_id=name,
        worker_id=_WORKER,
        engine=ENGINE,
        params=name.encode() + PARAMS,
        engine_ttl_seconds=480,
        num_tokens=64,
        num_blocks=2,
        retention_ttl_seconds=480,
    )
    await GrpcLedger(channel).commit(commit, timeout_seconds=30)
    ledger: Any = ledger_pb2_grpc.LedgerServiceStub(channel)
    key = common_pb2.ConversationKey(tenant="acme", model="tiny", conversation_id=name)
    await ledger.ReleaseConversation(ledger_pb2.ReleaseConversationRequest(key=key))


async def test_releases(short_watches: None) -> None:
    names = [f"conversation-{number}" for number in range(40)]
    heard: list[bytes] = []
    asked_after: list[int] = []

    async def listen(feed: GrpcReleaseFeed) -> None:
        revision = 0
        while len(heard) < len(names):
            asked_after.append(revision)
            async for release in feed.releases(_WORKER, revision):
                heard.append(release.params)
                revision = release.revision

    async with _kvmeta() as channel, asyncio.TaskGroup() as tasks:
        await register_decode(channel, _WORKER)
        tasks.create_task(listen(GrpcReleaseFeed(channel)))
        for name in names:
            await _leave_and_end(channel, name)
            await asyncio.sleep(_SHORT_WHILE / 4)

    assert heard == [name.encode() + PARAMS for name in names]
    assert len(asked_after) > 1


async def test_workers(short_watches: None) -> None:
    workers = [f"decode-{number}" for number in range(20)]
    heard: list[str] = []
    asked_after: list[int] = []

    async def listen(registry: GrpcRegistry) -> None:
        revision = 0
        while len(heard) < len(workers):
            asked_after.append(revision)
            async with aclosing(registry.watch(revision)) as changes:
                async for change in changes:
                    revision = change.revision
                    if change.type == registry_pb2.WatchWorkersResponse.TYPE_ADDED:
                        heard.append(change.worker.worker_id)

    async with _kvmeta() as channel, asyncio.TaskGroup() as tasks:
        tasks.create_task(listen(GrpcRegistry(channel)))
        for worker in workers:
            await register_decode(channel, worker)
            await asyncio.sleep(_SHORT_WHILE / 4)

    assert heard == workers
    assert len(asked_after) > 1


async def test_a_stream_that_fails_or_that_its_server_ends_is_not_one_whose_time_is_up() -> None:
    async with AsyncExitStack() as stack:
        kvmeta = await stack.enter_async_context(kvmeta_app.build(_SETTINGS))
        async with rpc.open_channel(f"127.0.0.1:{kvmeta.port}") as channel:
            ledger: Any = ledger_pb2_grpc.LedgerServiceStub(channel)
            refused = ledger.WatchReleases(ledger_pb2.WatchReleasesRequest())
            with pytest.raises(InvalidFieldError):
                await anext(long_streams.messages(refused))

            health: Any = channel
            watch = health.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            states = long_streams.messages(watch)
            assert await anext(states)
            leaving = asyncio.create_task(stack.aclose())
            with pytest.raises(UnavailableError):
                async for _ in states:
                    pass
            await leaving
