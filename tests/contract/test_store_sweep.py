"""What every store does as time passes, and about its log of releases."""

from __future__ import annotations

import pytest

from services.kvmeta.model import EngineRef, HandleState, MissReason, ReleaseCause
from services.kvmeta.store import Forgotten, Position, Swept
from tests.contract.kvmeta_stores import SECOND, commit, hit, key, miss, register, stored, worker


def position(row):
    return Position(row.commit_time_us, row.key.model, row.key.conversation_id)


async def test_nothing_is_swept_before_it_is_due(store, clock) -> None:
    await register(store)
    await stored(store, commit())
    clock.advance(474.999999)
    assert await store.sweep(10) == Swept()


async def test_a_due_handle_expires_and_is_released(store, clock) -> None:
    await register(store)
    await stored(store, commit(params=b"p"))
    clock.advance(475)
    assert await store.sweep(10) == Swept(expired=1)
    assert (await store.get(key())).state is HandleState.EXPIRED
    [release] = await store.releases("d1", 0, 10)
    assert (release.cause, release.handle.params) == (ReleaseCause.EXPIRED, b"p")
    assert (await miss(store)).reason is MissReason.EXPIRED
    assert await store.sweep(10) == Swept()


async def test_a_taken_handle_without_a_commit_becomes_spent_and_is_not_released(
    store, clock
) -> None:
    await register(store)
    await stored(store, commit())
    await hit(store)
    clock.advance(475)
    assert await store.sweep(10) == Swept(spent=1)
    assert (await store.get(key())).state is HandleState.SPENT
    assert await store.releases("d1", 0, 10) == []


async def test_no_release_is_written_once_the_engine_has_dropped_the_blocks(store, clock) -> None:
    await register(store)
    await stored(store, commit())
    clock.advance(480)
    assert await store.sweep(10) == Swept(expired=1)
    assert await store.releases("d1", 0, 10) == []


async def test_rows_expire_in_the_order_of_their_deadlines_not_of_their_insertion(
    store, clock
) -> None:
    await register(store)
    ttls = {"c-480": 480, "c-100": 100, "c-300": 300, "c-200": 200}
    for number, (name, ttl) in enumerate(ttls.items()):
        await stored(store, commit(key(name), request_id=f"r{number}", engine_ttl_seconds=ttl))
        clock.advance(1)
    clock.advance(92)
    assert await store.sweep(10) == Swept(expired=1)
    assert (await store.get(key("c-100"))).state is HandleState.EXPIRED
    clock.advance(205)
    assert await store.sweep(1) == Swept(expired=1, more=True)
    assert (await store.get(key("c-200"))).state is HandleState.EXPIRED
    assert (await store.get(key("c-300"))).state is HandleState.AVAILABLE
    assert await store.sweep(10) == Swept(expired=1)
    assert (await store.get(key("c-300"))).state is HandleState.EXPIRED
    assert (await store.get(key("c-480"))).state is HandleState.AVAILABLE


async def test_a_sweep_stops_at_its_limit(store, clock) -> None:
    await register(store)
    for number in range(25):
        await stored(store, commit(key(f"c-{number}"), request_id=f"r{number}"))
    clock.advance(475)
    swept = [await store.sweep(10) for _ in range(4)]
    assert [each.expired for each in swept] == [10, 10, 5, 0]
    assert [each.more for each in swept] == [True, True, False, False]


async def test_a_new_commit_puts_the_deadline_off(store, clock) -> None:
    await register(store)
    await stored(store, commit(turn=1, request_id="a", engine_ttl_seconds=100))
    clock.advance(50)
    await stored(store, commit(turn=2, request_id="b", engine_ttl_seconds=100))
    clock.advance(50)
    assert await store.sweep(10) == Swept()
    await hit(store, request_id="c")


async def test_dead_rows_are_forgotten_after_their_retention(store, clock) -> None:
    await register(store)
    await stored(store, commit())
    clock.advance(475)
    await store.sweep(10)
    clock.advance(3599)
    assert await store.sweep(10) == Swept()
    clock.advance(1)
    assert await store.sweep(10) == Swept(forgotten=1)
    assert await store.get(key()) is None
    assert (await miss(store)).turn == 1


async def test_an_opened_turn_keeps_a_dead_row_remembered(store, clock) -> None:
    await register(store)
    await stored(store, commit(turn=1))
    await store.end(key())
    clock.advance(3000)
    opened = await miss(store, request_id="b")
    clock.advance(3000)
    assert await store.sweep(10) == Swept()
    assert (await stored(store, commit(turn=opened.turn, request_id="b"))).turn == 2


@pytest.mark.parametrize("how", ["end", "void", "tombstone"])
async def test_every_dead_row_is_forgotten(store, clock, how) -> None:
    lease_id = await register(store)
    if how != "tombstone":
        await stored(store, commit())
    if how == "void":
        await store.end_lease(lease_id)
    else:
        await store.end(key())
    clock.advance(3600)
    assert await store.sweep(10) == Swept(forgotten=1)


async def test_releases_resume_after_a_revision(store) -> None:
    await register(store)
    for turn in range(1, 6):
        await stored(store, commit(turn=turn, request_id=f"r{turn}"))
    everything = await store.releases("d1", 0, 100)
    assert [release.handle.turn for release in everything] == [1, 2, 3, 4]
    revisions = [release.revision for release in everything]
    assert revisions == sorted(set(revisions))
    assert await store.releases("d1", revisions[1], 100) == everything[2:]
    assert await store.releases("d1", revisions[1], 1) == everything[2:3]
    assert await store.releases("d1", revisions[3], 100) == []


async def test_releases_are_forgotten_after_their_retention(store, clock) -> None:
    await register(store)
    await stored(store, commit(turn=1, request_id="a"))
    await stored(store, commit(turn=2, request_id="b"))
    clock.advance(100)
    await stored(store, commit(turn=3, request_id="c"))
    first, second = await store.releases("d1", 0, 10)
    clock.advance(980)  # the first one's engine TTL and the retention are over
    assert await store.forget_releases(10) is False
    # "b" was committed together with "a", so both of their releases are due.
    assert await store.releases("d1", 0, 10) == []
    assert await store.releases("d1", first.revision, 10) == Forgotten()
    assert await store.releases("d1", second.revision, 10) == []


async def test_a_watcher_that_missed_nothing_is_not_told_of_what_was_forgotten(
    store, clock
) -> None:
    await register(store)
    other = EngineRef("engine-2", "epoch-1")
    await register(store, worker("d2", engine=other))
    for turn in (1, 2):
        quiet = commit(key("x"), turn=turn, request_id=f"x{turn}", worker_id="d2", engine=other)
        await stored(store, quiet)
    [last_of_d2] = await store.releases("d2", 0, 10)
    for turn in range(1, 10):
        await stored(store, commit(turn=turn, request_id=f"r{turn}"))
    clock.advance(5000)
    await store.forget_releases(100)
    assert await store.releases("d2", last_of_d2.revision, 10) == []
    assert await store.releases("d1", last_of_d2.revision, 10) == Forgotten()


async def test_a_revision_that_was_never_given_out_is_out_of_range(store) -> None:
    await register(store)
    assert await store.releases("d1", 2**64 - 1, 10) == Forgotten()
    assert await store.releases("nobody", 0, 10) == []


async def test_forgetting_releases_stops_at_its_limit(store, clock) -> None:
    await register(store)
    for turn in range(1, 7):
        await stored(store, commit(turn=turn, request_id=f"r{turn}"))
    clock.advance(480 + 600)
    assert await store.forget_releases(3) is True
    assert len(await store.releases("d1", 0, 100)) == 2
    assert await store.forget_releases(3) is False
    assert await store.releases("d1", 0, 100) == []


async def test_a_ledger_that_cannot_trust_its_past_voids_every_live_handle(store) -> None:
    await register(store)
    await stored(store, commit(key("available")))
    await stored(store, commit(key("taken")))
    await hit(store, key("taken"))
    await stored(store, commit(key("ended")))
    await store.end(key("ended"))
    assert await store.void_all() == 2
    assert (await miss(store, key("available"))).reason is MissReason.VOID
    assert (await miss(store, key("taken"))).reason is MissReason.VOID
    assert (await miss(store, key("ended"))).reason is MissReason.RELEASED


async def test_conversations_are_listed_most_recent_first_in_pages(store, clock) -> None:
    await register(store)
    for number in range(7):
        clock.us += number % 2  # some are committed in the same microsecond
        await stored(store, commit(key(f"c-{number}"), request_id=f"r{number}"))
    await stored(store, commit(key("other", tenant="u"), request_id="u"))
    await store.end(key("never committed"))
    everything = await store.conversations("t", None, None, 100)
    expected = ["c-5", "c-6", "c-3", "c-4", "c-1", "c-2", "c-0"]
    assert [row.key.conversation_id for row in everything] == expected
    paged, after = [], None
    while page := await store.conversations("t", None, after, 2):
        paged += page
        after = position(page[-1])
    assert paged == everything


async def test_conversations_are_listed_by_model(store) -> None:
    await register(store)
    await stored(store, commit(key("a", model="m")))
    await stored(store, commit(key("b", model="n")))
    rows = await store.conversations("t", "n", None, 10)
    assert [row.key.conversation_id for row in rows] == ["b"]


async def test_extending_moves_the_row_within_the_sweep(store, clock) -> None:
    await register(store)
    await stored(store, commit())
    await store.extend(key(), 10 * SECOND)
    await store.extend(key(), 100 * SECOND)
    clock.advance(10)
    assert await store.sweep(10) == Swept()
    clock.advance(90)
    assert await store.sweep(10) == Swept(expired=1)
