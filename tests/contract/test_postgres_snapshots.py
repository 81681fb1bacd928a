"""What a statement returns that had to wait for another transaction."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from services.kvmeta.sql import conversations, taking
from tests.contract.kvmeta_stores import (
    POLICY,
    commit,
    hit,
    key,
    open_postgres_store,
    register,
    stored,
)

_WAITING = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")


@pytest.mark.parametrize("in_place", [False, True], ids=["new params", "params replaced"])
async def test_a_take_that_waited_for_a_commit_gets_that_commits_params(
    postgres, clock, in_place
) -> None:
    """The commit of a turn that held the handle replaces its params in place."""

    def other_turn(connection: sa.Connection) -> None:
        now_us = clock.now_us()
        if in_place:
            taking.take(connection, key(), "r2", now_us, POLICY)
        wanted = commit(params=b"new", request_id="r2")
        conversations.commit(connection, wanted, "handle-2", now_us, POLICY)

    engine = create_async_engine(sa.make_url(postgres.url).set(drivername="postgresql+asyncpg"))
    async with open_postgres_store(postgres.url, clock, POLICY) as store:
        await register(store)
        await stored(store, commit(params=b"old", request_id="r1"))
        async with engine.connect() as other, engine.connect() as watching:
            await other.run_sync(other_turn)
            async with asyncio.TaskGroup() as tasks:
                taking_late = tasks.create_task(hit(store, request_id="r3"))
                while not (await watching.execute(_WAITING)).scalar_one():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await other.commit()
        assert taking_late.result().conversation.handle_id == "handle-2"
        assert taking_late.result().params == b"new"
    await engine.dispose()
