"""A kvmeta over the store in memory, and stubs to call it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from kvloop import rpc
from kvloop.kvmeta.v1 import ledger_pb2_grpc, registry_pb2_grpc
from services.kvmeta import app
from services.kvmeta.memory_store import MemoryStore
from services.kvmeta.settings import KvmetaSettings
from tests.contract.kvmeta_stores import ManualClock


@dataclass(frozen=True)
class Served:
    """A kvmeta that serves, seen from outside and inside."""

    kvmeta: app.Kvmeta
    ledger: ledger_pb2_grpc.LedgerServiceAsyncStub
    registry: registry_pb2_grpc.RegistryServiceAsyncStub


@pytest.fixture
def clock() -> ManualClock:
    """The ledger's clock."""
    return ManualClock()


@pytest.fixture
def settings() -> KvmetaSettings:
    """Settings of the server; the sweeper runs when a test calls it."""
    return KvmetaSettings(
        listen="127.0.0.1:0",
        database_url="memory:",
        sweep_interval_seconds=3600,
        # Only a ring of the bell wakes a watcher.
        watch_poll_seconds=3600,
        shutdown_grace_seconds=0,
        max_params_bytes=1000,
        max_conversations_per_tenant=3,
    )


@pytest.fixture
async def served(settings: KvmetaSettings, clock: ManualClock) -> AsyncIterator[Served]:
    """A running kvmeta."""
    store = MemoryStore(clock, settings.policy())
    async with (
        app.build(settings, clock=clock, store=store) as kvmeta,
        rpc.open_channel(f"127.0.0.1:{kvmeta.port}") as channel,
    ):
        yield Served(
            kvmeta,
            ledger_pb2_grpc.LedgerServiceStub(channel),
            registry_pb2_grpc.RegistryServiceStub(channel),
        )
