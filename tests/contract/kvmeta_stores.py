"""Stores under test, and values to put into them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from services.kvmeta.deadlines import Policy
from services.kvmeta.memory_store import MemoryStore
from services.kvmeta.model import (
    MICROSECONDS,
    Commit,
    Conversation,
    ConversationKey,
    EngineRef,
    EngineTraits,
    HeldPin,
    Worker,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.rules import Stored
from services.kvmeta.sql import schema
from services.kvmeta.sql.postgres import open_postgres
from services.kvmeta.sql.releases import start_revisions
from services.kvmeta.sql.sqlite import open_sqlite
from services.kvmeta.sql.store import SqlStore
from services.kvmeta.sql.tables import counters, metadata
from services.kvmeta.store import Hit, Miss, Store

SECOND = MICROSECONDS
START_US = 1_800_000_000 * SECOND
LEASE_US = 10_000 * SECOND
"""Longer than any test's time, unless it is about leases."""

POLICY = Policy(
    handle_margin_us=5 * SECOND,
    handle_ttl_us=None,
    max_retention_us=3600 * SECOND,
    dead_retention_us=3600 * SECOND,
    release_retention_us=600 * SECOND,
    max_conversations=30,
)


class ManualClock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.us = START_US

    def now_us(self) -> int:
        return self.us

    def advance(self, seconds: float) -> None:
        self.us += round(seconds * SECOND)


@asynccontextmanager
async def open_memory(clock: ManualClock, policy: Policy) -> AsyncIterator[Store]:
    yield MemoryStore(clock, policy)


@asynccontextmanager
async def open_sqlite_store(
    path: Path, clock: ManualClock, policy: Policy
) -> AsyncIterator[SqlStore]:
    async with open_sqlite(path) as transactions:
        await transactions.write(schema.upgrade)
        await transactions.write(partial(start_revisions, at_least=clock.us))
        yield SqlStore(transactions, clock, policy)


@asynccontextmanager
async def open_postgres_store(
    url: str, clock: ManualClock, policy: Policy, *, empty: bool = True
) -> AsyncIterator[SqlStore]:
    """A store on the test run's server, emptied first unless it is shared."""
    async with open_postgres(sa.make_url(url), pool_size=8) as transactions:
        await transactions.write(schema.upgrade)
        if empty:
            await transactions.write(_empty)
            await transactions.write(partial(start_revisions, at_least=clock.us))
        yield SqlStore(transactions, clock, policy)


def _empty(connection: sa.Connection) -> None:
    names = ", ".join(table.name for table in metadata.sorted_tables if table is not counters)
    connection.execute(sa.text(f"TRUNCATE {names}"))
    connection.execute(sa.update(counters).values(value=0))


def key(conversation_id: str = "c", *, tenant: str = "t", model: str = "m") -> ConversationKey:
    return ConversationKey(tenant, model, conversation_id)


ENGINE = EngineRef("engine-1", "epoch-1")


def worker(
    worker_id: str = "d1",
    *,
    engine: EngineRef = ENGINE,
    role: WorkerRole = WorkerRole.DECODE,
    model: str = "m",
    state: WorkerState = WorkerState.ACTIVE,
    address: str = "127.0.0.1:7400",
    **traits: object,
) -> Worker:
    known = {
        "vllm_version": "0.32.0",
        "contract_version": 1,
        "block_size": 32,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "kv_connector": "KvloopConnector",
        "kv_buffer_device": "cpu",
        "side_channel_host": "127.0.0.1",
        "side_channel_port": 5700,
        "max_model_len": 4096,
        "num_kv_blocks": 1000,
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl_us": 480 * SECOND,
        "kv_recompute_threshold": 64,
        "hybrid_kv_cache": False,
        "lease_renewal": True,
        "kv_cache_dtype": "auto",
        "nixl_version": "1.5.1",
    }
    return Worker(
        worker_id=worker_id,
        role=role,
        address=address,
        model=model,
        engine=engine,
        traits=EngineTraits(**(known | traits)),  # type: ignore[arg-type]
        state=state,
    )


def commit(
    at: ConversationKey | None = None,
    *,
    turn: int = 0,
    request_id: str = "r1",
    worker_id: str = "d1",
    engine: EngineRef = ENGINE,
    params: bytes = b'{"remote_block_ids":[[1,2]]}',
    engine_ttl_seconds: float = 480,
    retention_seconds: float = 0,
    num_tokens: int = 64,
    num_blocks: int = 2,
) -> Commit:
    return Commit(
        key=at or key(),
        request_id=request_id,
        turn=turn,
        worker_id=worker_id,
        engine=engine,
        params=params,
        engine_ttl_us=round(engine_ttl_seconds * SECOND),
        retention_ttl_us=round(retention_seconds * SECOND),
        num_tokens=num_tokens,
        num_blocks=num_blocks,
    )


def leased(at: ConversationKey | None = None, **more: Any) -> Commit:
    """A commit whose pin lasts a minute and can be renewed up to 480 s."""
    return commit(at, engine_ttl_seconds=60, retention_seconds=480, **more)


def held(turn_id: str = "r1", *, remaining: float = 60, extension: float = 0) -> HeldPin:
    """A pin as its engine holds it; durations in seconds."""
    return HeldPin(turn_id, round(remaining * SECOND), round(extension * SECOND))


async def register(store: Store, made: Worker | None = None, *, lease_us: int = LEASE_US) -> str:
    """Register a worker, by default the one that `commit` names; its lease."""
    made = made or worker()
    lease_id = f"lease-{made.worker_id}-{made.engine.epoch}"
    await store.register(made, lease_id, lease_us)
    return lease_id


async def stored(store: Store, wanted: Commit) -> Conversation:
    """Commit and insist that it was stored."""
    verdict = await store.commit(wanted, f"handle-{wanted.request_id}")
    assert isinstance(verdict, Stored)
    return verdict.row


async def hit(store: Store, at: ConversationKey | None = None, request_id: str = "r2") -> Hit:
    """Take and insist on a handle."""
    outcome = await store.take(at or key(), request_id)
    assert isinstance(outcome, Hit)
    return outcome


async def miss(store: Store, at: ConversationKey | None = None, request_id: str = "r2") -> Miss:
    """Take and insist on a miss."""
    outcome = await store.take(at or key(), request_id)
    assert isinstance(outcome, Miss)
    return outcome
