"""A database of the previous schema is upgraded in place, and everything survives."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import sqlalchemy as sa

from services.kvmeta.clock import HostTime
from services.kvmeta.model import (
    EngineRef,
    HandleState,
    HeldPin,
    MissReason,
    PinVerdict,
    ReleaseCause,
    Retained,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.rules import Repeated
from services.kvmeta.sql import schema
from services.kvmeta.sql.marks import SqlMarks
from services.kvmeta.sql.store import SqlStore
from services.kvmeta.sql.tables import (
    CONVERSATION_COLUMNS,
    conversation_from_row,
    conversations,
    handle_params,
    release_floors,
    tenants,
)
from services.kvmeta.store import Ended, Forgotten, Swept
from tests.contract import schema_0001
from tests.contract.kvmeta_stores import POLICY, SECOND, commit, hit, key, miss, stored
from tests.contract.schema_0001 import NOW_US, PARAMS

ENGINE = EngineRef("engine-1", "epoch-1")
OWN_TTL = key("own ttl", tenant="u")


@pytest.fixture
async def database(bare_database):
    """A database of revision 0001, upgraded to the newest."""
    await bare_database.write(lambda connection: schema.upgrade(connection, "0001"))
    await bare_database.write(schema_0001.fill)
    await bare_database.write(schema.upgrade)
    return bare_database


@pytest.fixture
async def store(database, clock):
    """The ledger on that database."""
    clock.us = NOW_US
    return SqlStore(database, clock, POLICY)


async def rows_of(database, table: sa.Table) -> list[dict[str, object]]:
    query = sa.select(table).order_by(*table.primary_key.columns)
    rows = await database.read(lambda connection: connection.execute(query).mappings().all())
    return [dict(row) for row in rows]


async def test_every_conversation_is_read_back_with_the_meaning_it_had(database) -> None:
    query = sa.select(*CONVERSATION_COLUMNS, conversations.c.params_id)
    rows = await database.read(lambda connection: connection.execute(query).all())
    found = {(row.tenant, row.conversation_id): row for row in rows}
    assert len(found) == len(schema_0001.CONVERSATIONS)
    for old in schema_0001.CONVERSATIONS:
        row = found[old["tenant"], old["conversation_id"]]
        assert {name: getattr(row, name) for name in old} == old
        value = conversation_from_row(row)
        assert value.drop_time_us == value.commit_time_us + value.engine_ttl_us
        assert (value.retention_ttl_us, value.deadline_extension_us) == (0, 0)
        ended = value.state is HandleState.RELEASED
        assert value.release_cause is (ReleaseCause.ENDED if ended else None)


async def test_what_no_store_call_shows_is_read_back(database) -> None:
    old = {number: params for number, params in PARAMS.items() if number}
    params = await rows_of(database, handle_params)
    assert {row["params_id"]: row["params"] for row in params} == old
    assert await rows_of(database, release_floors) == [{"worker_id": "d1", "revision": 10}]
    counts = {row["tenant"]: row["conversations"] for row in await rows_of(database, tenants)}
    assert counts == {"t": 6, "u": 2}
    mark, _ = await SqlMarks(database, HostTime(), server_wall=False).load()
    assert mark is not None
    assert (mark.ledger_us, mark.reading.wall_us) == (NOW_US, NOW_US + 5)
    assert (mark.reading.boot_id, mark.reading.uptime_us) == ("b", 9)


async def test_workers_and_their_leases_are_read_back(store) -> None:
    revision, records = await store.registry()
    assert revision == 6
    d1, p1 = records
    for old, record in zip(schema_0001.WORKERS, records, strict=False):
        assert record.lease_id == old["lease_id"]
        assert record.revision == old["revision"]
        assert asdict(record.worker.traits) == {
            **old["traits"],
            "pin_lease_us": 0,
            "kv_block_bytes": 0,
            "prepared_legs": 0,
        }
    assert (d1.worker.worker_id, d1.worker.role) == ("d1", WorkerRole.DECODE)
    assert (p1.worker.role, p1.worker.state) == (WorkerRole.PREFILL, WorkerState.DRAINING)
    [(_, retained), _] = await store.workers(None, None, "", 10)
    assert retained == Retained(conversations=2, blocks=4)
    assert (await store.keep_alive("lease-d1", None)).ttl_us == 15 * SECOND


async def test_watchers_of_the_registry_resume_or_start_anew(store) -> None:
    assert await store.worker_changes(6) == []
    assert await store.worker_changes(5) == Forgotten()
    await store.end_lease("lease-d1")
    [removed] = await store.worker_changes(6)
    assert (removed.worker.worker_id, removed.removed, removed.revision) == ("d1", True, 7)
    assert removed.added_revision <= 6


async def test_releases_go_on_where_they_were(store) -> None:
    first, second = await store.releases("d1", 10, 10)
    assert (first.revision, first.cause) == (11, ReleaseCause.ENDED)
    assert (second.revision, second.cause) == (12, ReleaseCause.EXPIRED)
    assert first.handle.params == PARAMS[4]
    assert first.handle.deadline_extension_us == 0
    assert await store.releases("d1", 9, 10) == Forgotten()
    await store.end(key("available"))
    [third] = await store.releases("d1", 12, 10)
    assert (third.revision, third.handle.params) == (13, PARAMS[1])


async def test_available_handles_can_be_taken_and_the_turn_goes_on(store) -> None:
    taken = await hit(store, key("available"), "next")
    assert (taken.turn, taken.params) == (3, PARAMS[1])
    new = await stored(store, commit(key("available"), turn=3, request_id="next"))
    assert new.turn == 3
    assert (await hit(store, OWN_TTL, "next")).params == PARAMS[7]


async def test_dead_and_taken_handles_are_missed_for_the_reason_they_had(store) -> None:
    reasons = {
        state: (await miss(store, key(state), "next")).reason
        for state in ("taken", "spent", "released", "expired", "void")
    }
    assert reasons == {
        "taken": MissReason.TAKEN,
        "spent": MissReason.SPENT,
        "released": MissReason.RELEASED,
        "expired": MissReason.EXPIRED,
        "void": MissReason.VOID,
    }
    tombstone = key("tombstone", tenant="u")
    assert (await miss(store, tombstone, "next")).reason is MissReason.FIRST_TURN
    assert await store.get(tombstone) is None


async def test_the_holder_of_a_taken_handle_returns_it_or_commits(store) -> None:
    again = await store.take(key("taken"), "holder")
    assert (again.turn, again.params) == (3, PARAMS[2])
    assert await store.give_back(key("taken"), "handle-2", "holder") is not None
    taken = await hit(store, key("taken"), "next")
    await stored(store, commit(key("taken"), turn=taken.turn, request_id="next"))


async def test_commits_are_still_known_by_their_request(store) -> None:
    repeated = await store.commit(commit(key("available"), turn=2, request_id="r1"), "new")
    assert isinstance(repeated, Repeated)
    assert repeated.row.handle_id == "handle-1"


async def test_pins_of_before_are_known_to_be_fixed(store) -> None:
    asked = [HeldPin(f"r{number}", 300 * SECOND, 60 * SECOND) for number in range(1, 6)]
    checked = await store.check_pins("d1", ENGINE, asked)
    assert checked.renewed == 0
    assert [status.verdict for status in checked.statuses] == [
        PinVerdict.WANTED,
        PinVerdict.IN_USE,
        PinVerdict.UNOWNED,
        PinVerdict.RELEASE,
        PinVerdict.RELEASE,
    ]
    assert await store.evict("d1", ENGINE, ["r1", "r2"]) == ["r1"]


async def test_deadlines_and_ttls_of_before_hold(store, clock) -> None:
    clock.advance(53)
    await store.extend_leases()
    assert (await miss(store, OWN_TTL, "next")).reason is MissReason.EXPIRED
    clock.us = NOW_US + 474 * SECOND
    await store.extend_leases()
    assert (await miss(store, key("available"), "next")).reason is MissReason.EXPIRED
    assert await store.sweep(100) == Swept(expired=2, spent=1, forgotten=1)
    assert await store.end(key("void")) == Ended(found=True, released=False)
