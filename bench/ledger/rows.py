"""Fills a store with conversations, faster than commits would."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from services.kvmeta.clock import Clock
from services.kvmeta.memory_store import MemoryStore
from services.kvmeta.model import (
    MICROSECONDS,
    Commit,
    Conversation,
    ConversationKey,
    EngineRef,
    EngineTraits,
    HandleState,
    Worker,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.sql.tables import conversation_to_row, conversations, handle_params, tenants
from services.kvmeta.sql.transactions import Transactions
from services.kvmeta.store import RegistryStore

TENANT, MODEL, WORKER_ID = "default", "bench", "d1"
ENGINE = EngineRef("bench-engine", "epoch")
HOUR_US = 3600 * MICROSECONDS
_CHUNK = 5_000


@dataclass(frozen=True)
class Due:
    """How many rows are due soon, and when."""

    rows: int
    in_us: int


def name(number: int) -> str:
    """Id of a conversation; ids that follow each other lie far apart in an index."""
    return f"{number * 2_654_435_761 % 2**32:08x}-{number}"


async def register(store: RegistryStore) -> None:
    """Register the worker that holds all conversations, for good."""
    traits = EngineTraits(
        vllm_version="0",
        contract_version=1,
        block_size=32,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        kv_connector="bench",
        kv_buffer_device="cpu",
        side_channel_host="127.0.0.1",
        side_channel_port=5700,
        max_model_len=1,
        num_kv_blocks=1,
        bidirectional_kv_xfer=True,
        decoder_kv_blocks_ttl_us=HOUR_US,
        kv_recompute_threshold=0,
        hybrid_kv_cache=False,
        lease_renewal=True,
        kv_cache_dtype="auto",
        nixl_version="0",
    )
    worker = Worker(
        WORKER_ID,
        WorkerRole.DECODE,
        "127.0.0.1:7400",
        MODEL,
        ENGINE,
        traits,
        WorkerState.ACTIVE,
    )
    await store.register(worker, "bench-lease", 24 * HOUR_US)


async def fill_memory(store: MemoryStore, count: int, params: bytes) -> None:
    """Commit `count` conversations to a store in memory."""
    for number in range(count):
        commit = Commit(
            key=ConversationKey(TENANT, MODEL, name(number)),
            request_id="fill",
            turn=1,
            worker_id=WORKER_ID,
            engine=ENGINE,
            params=params,
            engine_ttl_us=HOUR_US,
            num_tokens=1000,
            num_blocks=32,
        )
        await store.commit(commit, f"fill-{number}")


async def fill_sql(
    transactions: Transactions, clock: Clock, count: int, params: bytes, due: Due
) -> None:
    """Insert `count` conversations into a database without any.

    The last `due.rows` of them are due in `due.in_us` microseconds.
    """
    now = clock.now_us()

    def expire_in(number: int) -> int:
        # Apart from each other, so that no two are due at once.
        return number + (due.in_us if number >= count - due.rows else HOUR_US)

    for first in range(0, count, _CHUNK):
        numbers = range(first, min(count, first + _CHUNK))

        def insert(connection: sa.Connection, numbers: range = numbers) -> None:
            connection.execute(
                sa.insert(handle_params),
                [
                    {"params_id": each + 1, "params": params, "due_time_us": now + 9 * HOUR_US}
                    for each in numbers
                ],
            )
            connection.execute(
                sa.insert(conversations), [_row(each, now, expire_in(each)) for each in numbers]
            )

        await transactions.write(insert)
    await transactions.write(
        lambda connection: connection.execute(
            sa.insert(tenants), {"tenant": TENANT, "conversations": count}
        )
    )
    await transactions.write(_after_fill)


def _after_fill(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.text(
                "SELECT setval(pg_get_serial_sequence('handle_params', 'params_id'),"
                " (SELECT coalesce(max(params_id), 1) FROM handle_params))"
            )
        )
    connection.execute(sa.text("ANALYZE"))


def _row(number: int, now_us: int, expire_in_us: int) -> dict[str, object]:
    key = ConversationKey(TENANT, MODEL, name(number))
    row = Conversation(
        key=key,
        issued_turn=1,
        ended_turn=0,
        conversation_ttl_us=None,
        state=HandleState.AVAILABLE,
        turn=1,
        handle_id=f"fill-{number}",
        worker_id=WORKER_ID,
        engine=ENGINE,
        num_tokens=1000,
        num_blocks=32,
        take_request_id="",
        take_turn=0,
        commit_request_id="fill",
        commit_revision=1,
        commit_time_us=now_us,
        expire_time_us=now_us + expire_in_us,
        engine_ttl_us=2 * HOUR_US,
        due_time_us=now_us + expire_in_us,
        revision=1,
    )
    return {
        "tenant": key.tenant,
        "model": key.model,
        "conversation_id": key.conversation_id,
        "params_id": number + 1,
        **conversation_to_row(row),
    }
