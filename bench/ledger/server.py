"""The ledger under measurement, in a process of its own: fill, then serve.

python -m bench.ledger.server URL ROWS PARAMS_BYTES DUE_ROWS DUE_IN_SECONDS

It writes one JSON object per line: {"filled": ROWS} from time to time, and at last
{"port": ..., "metrics_port": ...}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import sqlalchemy as sa

from bench.ledger import rows
from services.common import event_loop
from services.common.process import run_until_signal, setup_logging
from services.kvmeta import app
from services.kvmeta.clock import HostTime, LedgerClock
from services.kvmeta.memory_store import MemoryStore
from services.kvmeta.settings import KvmetaSettings, microseconds
from services.kvmeta.sql import schema
from services.kvmeta.sql.postgres import open_postgres
from services.kvmeta.sql.sqlite import open_sqlite
from services.kvmeta.sql.store import SqlStore
from services.kvmeta.sql.transactions import Transactions
from services.kvmeta.store import Store


async def _serve(url: str, count: int, params: bytes, due: rows.Due, stop: asyncio.Event) -> None:
    settings = KvmetaSettings(
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        max_conversations_per_tenant=10**9,
    )
    policy = settings.policy()
    host = HostTime()
    clock = LedgerClock(host.reading().wall_us, host.uptime_us(), host.uptime_us)
    async with AsyncExitStack() as stack:
        store: Store
        if url == "memory:":
            store = MemoryStore(clock, policy)
            await rows.fill(store, count, params, _filled)
        else:
            transactions: Transactions = await stack.enter_async_context(
                open_postgres(sa.make_url(url), pool_size=settings.postgres_pool_size)
                if url.startswith("postgresql")
                else open_sqlite(Path(sa.make_url(url).database or ""))
            )
            await transactions.write(schema.upgrade)
            store = SqlStore(transactions, clock, policy)
            await rows.fill_sql(store, transactions, count, params, due, _filled)
        async with app.build(settings, clock=clock, store=store) as kvmeta:
            _tell({"port": kvmeta.port, "metrics_port": kvmeta.metrics_port})
            await stop.wait()


def _filled(count: int) -> None:
    _tell({"filled": count})


def _tell(event: dict[str, int | None]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until a signal comes."""
    url, count, params_bytes, due_rows, due_in_seconds = sys.argv[1:]
    setup_logging(level="warning", json=False)
    params = b"p" * int(params_bytes)
    due = rows.Due(int(due_rows), microseconds(float(due_in_seconds)))
    event_loop.run(run_until_signal(lambda stop: _serve(url, int(count), params, due, stop)))


if __name__ == "__main__":
    main()
