"""Between reading what pins are and writing it, others may be faster."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from services.kvmeta.model import HandleState, HeldPin, PinVerdict
from services.kvmeta.sql import pins, schema
from services.kvmeta.sql.postgres import open_postgres
from services.kvmeta.sql.sqlite import open_sqlite
from services.kvmeta.sql.store import SqlStore
from tests.contract.kvmeta_stores import (
    ENGINE,
    POLICY,
    SECOND,
    ManualClock,
    commit,
    hit,
    key,
    open_postgres_store,
    register,
    stored,
)


@pytest.fixture(params=["sqlite", "postgres"])
async def transactions(request, tmp_path, clock):
    """Transactions on an empty ledger."""
    if request.param == "sqlite":
        async with open_sqlite(tmp_path / "ledger.db") as made:
            await made.write(schema.upgrade)
            yield made
        return
    url = request.getfixturevalue("postgres").url
    async with open_postgres_store(url, clock, POLICY):
        pass  # emptied
    async with open_postgres(sa.make_url(url), pool_size=4) as made:
        yield made


@pytest.fixture
async def store(transactions, clock):
    """A ledger with one leased handle of a minute."""
    made = SqlStore(transactions, clock, POLICY)
    await register(made)
    await stored(made, commit(engine_ttl_seconds=60, retention_seconds=480))
    return made


async def read(transactions, clock: ManualClock, pin: HeldPin) -> pins.Answer:
    answer = await transactions.read(
        lambda c: pins.read(c, "d1", ENGINE, [pin], clock.now_us(), POLICY)
    )
    assert isinstance(answer, pins.Answer)
    assert answer.changes
    return answer


async def write(transactions, clock: ManualClock, answer: pins.Answer):
    return await transactions.write(lambda c: pins.write(c, answer, clock.now_us(), POLICY))


async def test_a_handle_taken_at_a_slower_replica_is_not_released_as_expired(
    transactions, store, clock
) -> None:
    clock.advance(55)
    ahead = ManualClock()
    ahead.us, clock.us = clock.us, clock.us - SECOND
    answer = await read(transactions, ahead, HeldPin("r1", 5 * SECOND, 0))
    assert answer.statuses[0].verdict is PinVerdict.RELEASE
    taken = await hit(store)
    checked = await write(transactions, ahead, answer)
    assert checked.statuses[0].verdict is PinVerdict.IN_USE
    assert checked.expired == 0
    assert await store.get(key()) == taken.conversation
    assert await store.releases("d1", 0, 10) == []


async def test_a_renewal_that_loses_to_a_take_changes_nothing(transactions, store, clock) -> None:
    clock.advance(20)
    answer = await read(transactions, clock, HeldPin("r1", 60 * SECOND, 20 * SECOND))
    taken = await hit(store)
    await write(transactions, clock, answer)
    assert await store.get(key()) == taken.conversation
    assert taken.conversation.state is HandleState.TAKEN


async def test_a_renewal_that_loses_to_a_new_commit_changes_nothing(
    transactions, store, clock
) -> None:
    clock.advance(20)
    answer = await read(transactions, clock, HeldPin("r1", 60 * SECOND, 20 * SECOND))
    newer = commit(turn=2, request_id="r2", engine_ttl_seconds=60, retention_seconds=480)
    row = await stored(store, newer)
    await write(transactions, clock, answer)
    assert await store.get(key()) == row
