"""What every store does about workers and their leases."""

from __future__ import annotations

import pytest

from services.kvmeta.model import (
    EngineRef,
    HandleState,
    MissReason,
    ReleaseCause,
    Retained,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.store import Forgotten, Renewal
from tests.contract.kvmeta_stores import SECOND, commit, hit, key, miss, register, stored, worker

LEASE = 15 * SECOND
RESTARTED = EngineRef("engine-1", "epoch-2")


async def listed(store) -> list[str]:
    entries = await store.workers(None, None, "", 100)
    return [record.worker.worker_id for record, _ in entries]


async def test_a_registered_worker_is_listed_with_all_its_facts(store, clock) -> None:
    made = worker(hybrid_kv_cache=True, num_kv_blocks=2**40, kv_cache_dtype="fp8")
    assert await store.register(made, "lease", LEASE) == 0
    [(record, retained)] = await store.workers(None, None, "", 10)
    assert record.worker == made
    assert record.lease_expire_us == clock.us + LEASE
    assert retained == Retained()


async def test_a_new_engine_life_voids_the_handles_of_the_old_one_only(store) -> None:
    await register(store)
    other = EngineRef("engine-2", "epoch-1")
    await register(store, worker("d2", engine=other))
    await stored(store, commit(key("old-1")))
    await stored(store, commit(key("old-2")))
    await hit(store, key("old-2"))
    await stored(store, commit(key("elsewhere"), worker_id="d2", engine=other))
    assert await store.register(worker(engine=RESTARTED), "lease-2", LEASE) == 2
    assert (await store.get(key("old-1"))).state is HandleState.VOID
    assert (await store.get(key("old-2"))).state is HandleState.VOID
    await hit(store, key("elsewhere"))
    assert await store.releases("d1", 0, 10) == []  # the blocks died with the engine


async def test_registering_the_same_engine_again_keeps_its_handles(store) -> None:
    await register(store)
    await stored(store, commit())
    assert await store.register(worker(), "lease-2", LEASE) == 0
    await hit(store)


async def test_a_new_registration_ends_the_lease_before(store) -> None:
    lease_id = await register(store)
    await store.register(worker(engine=RESTARTED), "lease-2", LEASE)
    assert await store.keep_alive(lease_id, None) is None
    assert await store.end_lease(lease_id) is None
    assert await listed(store) == ["d1"]


async def test_a_renewed_lease_lives_on(store, clock) -> None:
    lease_id = await register(store, lease_us=LEASE)
    for _ in range(4):
        clock.us += LEASE - 1
        assert await store.keep_alive(lease_id, None) == Renewal(LEASE, state_changed=False)
    assert await store.end_leases(10) == []


async def test_a_lease_that_ran_out_cannot_be_renewed_even_before_the_sweep(store, clock) -> None:
    lease_id = await register(store, lease_us=LEASE)
    clock.us += LEASE
    assert await store.keep_alive(lease_id, None) is None
    assert await listed(store) == []
    assert await store.keep_alive("never granted", None) is None


async def test_a_lease_that_ran_out_removes_the_worker_and_voids_its_handles(store, clock) -> None:
    await register(store, lease_us=LEASE)
    await stored(store, commit(key("available"), params=b"p"))
    await stored(store, commit(key("taken")))
    await hit(store, key("taken"))
    clock.us += LEASE
    assert await store.end_leases(10) == ["d1"]
    assert await store.end_leases(10) == []
    assert (await store.get(key("available"))).state is HandleState.VOID
    assert (await store.get(key("taken"))).state is HandleState.VOID
    # The engine may live on: it is told what nobody can take any more, and
    # nothing that a prefill engine may be reading.
    [release] = await store.releases("d1", 0, 10)
    assert release.cause is ReleaseCause.LEASE_ENDED
    assert release.handle.params == b"p"


async def test_a_worker_that_comes_back_does_not_get_its_handles_back(store, clock) -> None:
    await register(store, lease_us=LEASE)
    await stored(store, commit())
    clock.us += LEASE
    await store.end_leases(10)
    assert await store.register(worker(), "lease-2", LEASE) == 0
    assert (await miss(store)).reason is MissReason.VOID


async def test_only_leases_that_ran_out_are_ended_and_no_more_than_asked(store, clock) -> None:
    for number in range(5):
        engine = EngineRef(f"engine-{number}", "e")
        await register(store, worker(f"d{number}", engine=engine), lease_us=LEASE)
    await register(store, worker("p1", role=WorkerRole.PREFILL), lease_us=LEASE + 1)
    clock.us += LEASE
    assert await store.end_leases(3) == ["d0", "d1", "d2"]
    assert await store.end_leases(3) == ["d3", "d4"]
    assert await listed(store) == ["p1"]


async def test_deregistering_ends_the_lease_at_once(store) -> None:
    lease_id = await register(store)
    await stored(store, commit())
    assert await store.end_lease(lease_id) == "d1"
    assert await store.end_lease(lease_id) is None
    assert await listed(store) == []
    assert (await store.get(key())).state is HandleState.VOID


async def test_leases_get_a_full_period_after_the_ledger_was_away(store, clock) -> None:
    lease_id = await register(store, lease_us=LEASE)
    clock.us += 100 * LEASE
    assert await store.extend_leases() == 1
    assert await store.end_leases(10) == []
    clock.us += LEASE - 1
    assert await store.keep_alive(lease_id, None) == Renewal(LEASE, state_changed=False)


async def test_ended_leases_are_not_extended(store) -> None:
    await store.end_lease(await register(store))
    assert await store.extend_leases() == 0
    assert await listed(store) == []


async def test_a_state_change_comes_with_a_renewal(store) -> None:
    lease_id = await register(store)
    revision, _ = await store.registry()
    renewal = await store.keep_alive(lease_id, WorkerState.DRAINING)
    assert renewal.state_changed
    [changed] = await store.worker_changes(revision)
    assert changed.worker.state is WorkerState.DRAINING
    assert not (await store.keep_alive(lease_id, WorkerState.DRAINING)).state_changed
    assert not (await store.keep_alive(lease_id, None)).state_changed
    assert await store.worker_changes(changed.revision) == []


async def test_changes_resume_after_a_revision(store) -> None:
    lease_id = await register(store)
    await register(store, worker("d2", engine=EngineRef("e2", "e")))
    first, second = await store.worker_changes(0)
    assert [first.worker.worker_id, second.worker.worker_id] == ["d1", "d2"]
    await store.end_lease(lease_id)
    [removed] = await store.worker_changes(second.revision)
    assert (removed.worker.worker_id, removed.removed) == ("d1", True)
    revision, records = await store.registry()
    assert revision == removed.revision
    assert [record.worker.worker_id for record in records] == ["d2"]


async def test_no_change_is_missed_or_repeated_from_any_revision(store) -> None:
    lease_id = await register(store)
    start, _ = await store.registry()
    await register(store, worker("d2", engine=EngineRef("e2", "e")))
    await store.keep_alive(lease_id, WorkerState.DRAINING)
    await store.end_lease("lease-d2-e")
    await register(store, worker("d3", engine=EngineRef("e3", "e")))
    everything = await store.worker_changes(start)
    assert [record.worker.worker_id for record in everything] == ["d1", "d2", "d3"]
    assert [record.revision - start for record in everything] == [2, 3, 4]
    for position in range(5):
        later = [record for record in everything if record.revision > start + position]
        assert await store.worker_changes(start + position) == later


async def test_a_worker_that_comes_back_after_its_removal_is_added_anew(store) -> None:
    lease_id = await register(store)
    [first] = await store.worker_changes(0)
    assert first.added_revision == first.revision
    await store.register(worker(engine=RESTARTED), "lease-2", LEASE)
    [replaced] = await store.worker_changes(first.revision)
    assert replaced.added_revision == first.revision
    assert await store.end_lease(lease_id) is None
    await store.end_lease("lease-2")
    [removed] = await store.worker_changes(replaced.revision)
    assert (removed.removed, removed.added_revision) == (True, first.revision)
    await store.register(worker(engine=RESTARTED), "lease-3", LEASE)
    [back] = await store.worker_changes(removed.revision)
    assert (back.removed, back.added_revision) == (False, back.revision)


async def test_changes_after_a_revision_that_was_never_given_out_are_unknown(store) -> None:
    await register(store)
    revision, _ = await store.registry()
    assert await store.worker_changes(revision) == []
    assert await store.worker_changes(revision + 1) == Forgotten()
    assert await store.worker_changes(2**63 - 1) == Forgotten()
    assert await store.worker_changes(2**64 - 1) == Forgotten()


async def test_a_watcher_that_missed_a_forgotten_removal_is_told(store, clock) -> None:
    lease_id = await register(store)
    before, _ = await store.registry()
    await store.end_lease(lease_id)
    await register(store, worker("d2", engine=EngineRef("e2", "e")))
    removal = before + 1
    clock.advance(3600)
    assert await store.forget_workers(10) == 1
    assert await store.worker_changes(before) == Forgotten()
    [later] = await store.worker_changes(removal)
    assert later.worker.worker_id == "d2"


async def test_a_removed_worker_is_forgotten_after_its_retention(store, clock) -> None:
    await store.end_lease(await register(store))
    clock.advance(3599)
    assert await store.forget_workers(10) == 0
    clock.advance(1)
    assert await store.forget_workers(10) == 1
    assert await store.worker_changes(0) == []


@pytest.mark.parametrize(
    ("model", "role", "expected"),
    [
        (None, None, ["d1", "d2", "p1"]),
        ("m", None, ["d1", "p1"]),
        (None, WorkerRole.DECODE, ["d1", "d2"]),
        ("n", WorkerRole.PREFILL, []),
    ],
)
async def test_workers_are_listed_by_model_and_role(store, model, role, expected) -> None:
    await register(store, worker("p1", role=WorkerRole.PREFILL))
    await register(store, worker("d2", model="n", engine=EngineRef("e2", "e")))
    await register(store, worker("d1"))
    entries = await store.workers(model, role, "", 10)
    assert [record.worker.worker_id for record, _ in entries] == expected


async def test_workers_are_paged_by_id_in_code_point_order(store) -> None:
    names = ["B", "a", "ä", "Z", "_", "10", "9"]
    for name in names:
        await register(store, worker(name, engine=EngineRef(name, "e")))
    paged, after = [], ""
    while page := await store.workers(None, None, after, 3):
        paged += [record.worker.worker_id for record, _ in page]
        after = paged[-1]
    assert paged == sorted(names)


async def test_retained_conversations_and_blocks_are_those_that_can_be_taken(store) -> None:
    await register(store)
    await stored(store, commit(key("a"), num_blocks=3))
    await stored(store, commit(key("b"), num_blocks=4))
    await stored(store, commit(key("taken"), num_blocks=100))
    await hit(store, key("taken"))
    [(_, retained)] = await store.workers(None, None, "", 10)
    assert retained == Retained(conversations=2, blocks=7)
