"""kvmeta processes that are killed and started again, as a supervisor would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from kvloop import rpc
from kvloop.kvmeta.v1 import ledger_pb2_grpc, registry_pb2_grpc
from tests.contract.kvmeta_process import KvmetaProcess, run_kvmeta
from tests.contract.postgres_server import PostgresServer
from tests.free_ports import held_port

Gone = Callable[[], Awaitable[None]]
"""Waits until nothing that a killed process began can still be carried out."""


class Replica:
    """One kvmeta, always at the same port; made by `supervised`.

    Args:
        process: its first life.
        ledger: a client that waits while it is down.
        registry: likewise.
        gone: awaited after each death.
    """

    def __init__(
        self,
        process: KvmetaProcess,
        ledger: ledger_pb2_grpc.LedgerServiceAsyncStub,
        registry: registry_pb2_grpc.RegistryServiceAsyncStub,
        gone: Gone,
    ) -> None:
        self.ledger = ledger
        self.registry = registry
        self.up = asyncio.Event()
        self.up.set()
        self._process = process
        self._gone = gone
        self._dying = False
        self._to_settle: list[Callable[[], None]] = []

    async def kill(self) -> None:
        """kill -9, and wait for the end of all that it had begun."""
        self.up.clear()
        self._dying = True
        await self._process.kill()
        await self._gone()
        self._dying = False
        to_settle, self._to_settle = self._to_settle, []
        for settle in to_settle:
            settle()

    def when_settled(self, settle: Callable[[], None], *, process_died: bool) -> None:
        """Call `settle` once a call whose answer was lost can no longer be carried out.

        Args:
            settle: what to call.
            process_died: the connection broke. If false, the process said that it
                does not know, and only its death will settle that.
        """
        if process_died and not self._dying:
            settle()
        else:
            self._to_settle.append(settle)

    async def keep_up(self, database_url: str) -> None:
        """Start it again whenever it has died, for ever."""
        port = self._process.port
        while True:
            await self._process.process.wait()
            async with run_kvmeta(database_url, port=port) as self._process:
                self.up.set()
                await self._process.process.wait()


@asynccontextmanager
async def supervised(database_url: str, gone: Gone) -> AsyncIterator[Replica]:
    """A kvmeta that is started again when it dies."""
    async with (
        run_kvmeta(database_url, port=held_port()) as process,
        rpc.open_channel(f"127.0.0.1:{process.port}") as channel,
        asyncio.TaskGroup() as tasks,
    ):
        replica = Replica(
            process,
            ledger_pb2_grpc.LedgerServiceStub(channel),
            registry_pb2_grpc.RegistryServiceStub(channel),
            gone,
        )
        keeper = tasks.create_task(replica.keep_up(database_url), name="supervisor")
        yield replica
        keeper.cancel()


async def died_with_its_process() -> None:
    """SQLite runs inside the process: what it had not committed is gone."""


@asynccontextmanager
async def own_role(server: PostgresServer, name: str) -> AsyncIterator[tuple[str, Gone]]:
    """A database URL with a role of its own, and the end of that role's connections.

    PostgreSQL may finish a statement after the client that sent it was killed.
    """
    engine = create_async_engine(
        sa.make_url(server.url).set(drivername="postgresql+asyncpg"),
        isolation_level="AUTOCOMMIT",
    )
    count = sa.text("SELECT count(*) FROM pg_stat_activity WHERE usename = :name")

    async def gone() -> None:
        async with engine.connect() as connection:
            while (await connection.execute(count, {"name": name})).scalar_one():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async with engine.connect() as connection:
        await connection.execute(sa.text(f"CREATE ROLE {name} SUPERUSER LOGIN"))
    try:
        yield str(sa.make_url(server.url).set(username=name)), gone
    finally:
        await engine.dispose()
