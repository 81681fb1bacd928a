"""Fills a store with conversations, in bulk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import sqlalchemy as sa

from services.kvmeta.model import (
    MICROSECONDS,
    Commit,
    ConversationKey,
    EngineRef,
    EngineTraits,
    Worker,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.sql.tables import conversations, handle_params, tenants
from services.kvmeta.sql.transactions import Transactions
from services.kvmeta.store import Store

TENANT, MODEL, WORKER_ID = "default", "bench", "d1"
ENGINE = EngineRef("bench-engine", "epoch")
HOUR_US = 3600 * MICROSECONDS
_CHUNK = 50_000
_MULTIPLIER, _MODULUS = 2_654_435_761, 2**32

Progress = Callable[[int], None]
"""Is told how many conversations there are so far."""


@dataclass(frozen=True)
class Due:
    """How many rows are due soon, and when."""

    rows: int
    in_us: int


def name(number: int) -> str:
    """Id of a conversation; ids that follow each other lie far apart in an index."""
    return f"{number * _MULTIPLIER % _MODULUS}-{number}"


async def fill(store: Store, count: int, params: bytes, told: Progress) -> None:
    """Commit `count` conversations to a store without a database.

    It registers the worker that holds them.
    """
    await _register(store)
    for number in range(count):
        await store.commit(_commit(number, params), f"fill-{number}")
        if number % _CHUNK == 0:
            told(number)


async def fill_sql(
    store: Store, transactions: Transactions, count: int, params: bytes, due: Due, told: Progress
) -> None:
    """Put `count` conversations into an empty database.

    The first is committed as usual, and the database copies it. The last `due.rows`
    are due in `due.in_us` microseconds.
    """
    await _register(store)
    await store.commit(_commit(0, params), "fill-0")
    for start in range(1, count, _CHUNK):
        numbers = range(start, min(count, start + _CHUNK))
        await transactions.write(partial(_copy, numbers=numbers, count=count, due=due))
        told(numbers.stop)
    await transactions.write(lambda c: c.execute(sa.update(tenants).values(conversations=count)))
    await transactions.write(_after_fill)


def _copy(connection: sa.Connection, numbers: range, count: int, due: Due) -> None:
    """Copy conversation 0 and its params once per number."""
    series = _series(numbers)
    n = series.c.n
    c, p = conversations.c, handle_params.c
    # Apart from each other, so that no two are due at once.
    expire = n + sa.case(
        (n >= count - due.rows, c.commit_time_us + due.in_us), else_=c.expire_time_us
    )
    row = {column.name: column for column in c} | {
        "conversation_id": _text(n * _MULTIPLIER % _MODULUS) + "-" + _text(n),
        "handle_id": "fill-" + _text(n),
        "commit_request_id": "fill-" + _text(n),
        "expire_time_us": expire,
        "due_time_us": expire,
        "params_id": c.params_id + n,
    }
    # A join, so that the database is known to be asked for every pair on purpose.
    each = conversations.join(series, sa.true())
    first = sa.and_(c.tenant == TENANT, c.model == MODEL, c.conversation_id == name(0))
    columns = {"params_id": p.params_id + n, "params": p.params, "due_time_us": p.due_time_us}
    with_params = each.join(handle_params, p.params_id == c.params_id)
    copies = sa.select(*columns.values()).select_from(with_params).where(first)
    connection.execute(sa.insert(handle_params).from_select(list(columns), copies))
    copies = sa.select(*row.values()).select_from(each).where(first)
    connection.execute(sa.insert(conversations).from_select(list(row), copies))


def _series(numbers: range) -> sa.CTE:
    series = sa.select(sa.literal(numbers.start, sa.BigInteger).label("n")).cte(
        "series", recursive=True
    )
    return series.union_all(sa.select(series.c.n + 1).where(series.c.n < numbers.stop - 1))


def _text(number: sa.ColumnElement[int]) -> sa.ColumnElement[str]:
    return sa.cast(number, sa.Text)


def _after_fill(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.text(
                "SELECT setval(pg_get_serial_sequence('handle_params', 'params_id'),"
                " (SELECT coalesce(max(params_id), 1) FROM handle_params))"
            )
        )
    connection.execute(sa.text("ANALYZE"))


def _commit(number: int, params: bytes) -> Commit:
    return Commit(
        key=ConversationKey(TENANT, MODEL, name(number)),
        request_id=f"fill-{number}",
        turn=1,
        worker_id=WORKER_ID,
        engine=ENGINE,
        params=params,
        engine_ttl_us=HOUR_US,
        retention_ttl_us=0,
        num_tokens=1000,
        num_blocks=32,
    )


async def _register(store: Store) -> None:
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
