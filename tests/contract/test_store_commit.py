"""What every store does about commits, ends and TTLs."""

from __future__ import annotations

import asyncio

import pytest

from services.kvmeta.model import EngineRef, HandleState, MissReason, ReleaseCause
from services.kvmeta.rules import EngineGone, Repeated, Stored, Superseded
from services.kvmeta.store import Ended, TooManyConversations, TtlNotHonoured
from tests.contract.kvmeta_stores import (
    POLICY,
    SECOND,
    START_US,
    commit,
    hit,
    key,
    miss,
    register,
    stored,
    worker,
)


async def releases(store, worker_id="d1", after=0):
    return await store.releases(worker_id, after, 100)


async def test_a_commit_is_stored_with_all_its_facts(store) -> None:
    await register(store)
    row = await stored(store, commit(turn=1, num_tokens=70, num_blocks=3))
    assert row == await store.get(key())
    assert (row.turn, row.num_tokens, row.num_blocks) == (1, 70, 3)
    assert (row.worker_id, row.engine) == ("d1", EngineRef("engine-1", "epoch-1"))
    assert row.commit_time_us == START_US
    assert row.expire_time_us == START_US + 475 * SECOND


async def test_turn_zero_is_numbered_after_the_newest_opened(store) -> None:
    await register(store)
    assert (await stored(store, commit(request_id="a"))).turn == 1
    await hit(store)
    assert (await stored(store, commit(request_id="b"))).turn == 3


async def test_a_repeated_commit_gives_the_same_answer(store, clock) -> None:
    await register(store)
    row = await stored(store, commit(turn=1))
    clock.advance(1)
    assert await store.commit(commit(turn=1), "another-handle-id") == Repeated(row)
    await hit(store)
    repeated = await store.commit(commit(turn=1), "another-handle-id")
    assert isinstance(repeated, Repeated)
    assert repeated.row.handle_id == row.handle_id
    assert repeated.row.commit_revision == row.commit_revision


async def test_a_turn_decoded_again_elsewhere_loses_its_second_commit(store) -> None:
    elsewhere = EngineRef("engine-2", "epoch-1")
    await register(store)
    await register(store, worker("d2", engine=elsewhere))
    row = await stored(store, commit(turn=1))
    second = await store.commit(
        commit(turn=1, worker_id="d2", engine=elsewhere), "another-handle-id"
    )
    assert second == Superseded(row.turn, ended=False)
    assert await store.get(key()) == row


async def test_concurrent_repeats_of_one_commit_store_one_handle(store) -> None:
    await register(store)
    verdicts = await asyncio.gather(
        *(store.commit(commit(turn=1), f"handle-{n}") for n in range(8))
    )
    assert len([verdict for verdict in verdicts if isinstance(verdict, Stored)]) == 1
    assert len({verdict.row.handle_id for verdict in verdicts}) == 1


@pytest.mark.parametrize("late_turn", [1, 2])
async def test_an_older_or_equal_turn_loses(store, late_turn) -> None:
    await register(store)
    await stored(store, commit(turn=2, request_id="new"))
    verdict = await store.commit(commit(turn=late_turn, request_id="late"), "h")
    assert verdict == Superseded(newest_turn=2, ended=False)
    assert (await store.get(key())).commit_request_id == "new"
    assert await releases(store) == []


async def test_of_concurrent_first_turns_one_is_stored(store) -> None:
    await register(store)
    verdicts = await asyncio.gather(
        *(store.commit(commit(turn=1, request_id=f"r-{n}"), f"h-{n}") for n in range(16))
    )
    assert [type(verdict) for verdict in verdicts].count(Stored) == 1
    assert [type(verdict) for verdict in verdicts].count(Superseded) == 15


async def test_a_newer_turn_releases_an_unused_handle(store) -> None:
    await register(store)
    await stored(store, commit(turn=1, request_id="a", params=b"old"))
    await stored(store, commit(turn=2, request_id="b", params=b"new"))
    [release] = await releases(store)
    assert release.cause is ReleaseCause.SUPERSEDED
    assert release.handle.handle_id == "handle-a"
    assert release.handle.params == b"old"
    assert release.handle.engine == EngineRef("engine-1", "epoch-1")
    assert (await hit(store)).params == b"new"


async def test_a_newer_turn_releases_no_handle_that_was_given_out(store) -> None:
    await register(store)
    await stored(store, commit(turn=1, request_id="a"))
    await hit(store)
    await stored(store, commit(turn=2, request_id="b", params=b"new"))
    assert await releases(store) == []
    assert (await hit(store, request_id="c")).params == b"new"


async def test_a_release_goes_to_the_worker_that_holds_the_blocks(store) -> None:
    await register(store)
    other = EngineRef("engine-2", "epoch-1")
    await register(store, worker("d2", engine=other))
    await stored(store, commit(turn=1, request_id="a"))
    await stored(store, commit(turn=2, request_id="b", worker_id="d2", engine=other))
    assert [release.handle.handle_id for release in await releases(store, "d1")] == ["handle-a"]
    assert await releases(store, "d2") == []


async def test_a_commit_supersedes_a_handle_that_a_newer_turn_holds(store) -> None:
    # Turn 3 took turn 1's handle; turn 2 had missed, computed, and commits first.
    await register(store)
    await stored(store, commit(turn=1, request_id="a"))
    await hit(store, request_id="b")  # turn 2
    assert await store.give_back(key(), "handle-a", "b")
    await hit(store, request_id="c")  # turn 3
    await stored(store, commit(turn=2, request_id="b"))
    assert await store.give_back(key(), "handle-a", "c") is None
    assert (await stored(store, commit(turn=3, request_id="c"))).turn == 3
    assert [release.handle.handle_id for release in await releases(store)] == ["handle-b"]


@pytest.mark.parametrize("wrong", ["never registered", "other epoch", "lease ran out"])
async def test_a_commit_for_an_engine_that_is_gone_is_refused(store, clock, wrong) -> None:
    if wrong != "never registered":
        await register(store, lease_us=100)
    if wrong == "lease ran out":
        clock.us += 100
    engine = EngineRef("engine-1", "epoch-0" if wrong == "other epoch" else "epoch-1")
    assert await store.commit(commit(engine=engine), "h") == EngineGone()
    assert await store.get(key()) is None


async def test_the_holder_of_a_handle_cannot_commit_for_an_engine_that_is_gone(
    store, clock
) -> None:
    await register(store, lease_us=100)
    await stored(store, commit(turn=1, request_id="a"))
    taken = await hit(store, request_id="b")
    other = EngineRef("engine-2", "epoch-1")
    elsewhere = commit(turn=taken.turn, request_id="b", worker_id="d2", engine=other)
    assert await store.commit(elsewhere, "h") == EngineGone()
    clock.us += 100
    assert await store.commit(commit(turn=taken.turn, request_id="b"), "h") == EngineGone()
    assert (await store.get(key())).state is HandleState.TAKEN


async def test_the_holder_of_a_handle_cannot_commit_under_another_turns_number(store) -> None:
    await register(store)
    await stored(store, commit(turn=1, request_id="a"))
    await hit(store, request_id="b")
    verdict = await store.commit(commit(turn=1, request_id="b"), "h")
    assert verdict == Superseded(newest_turn=1, ended=False)


async def test_a_commit_repeated_after_the_engine_is_gone_still_succeeds(store) -> None:
    lease_id = await register(store)
    await stored(store, commit(turn=1))
    await store.end_lease(lease_id)
    assert isinstance(await store.commit(commit(turn=1), "h"), Repeated)


async def test_revisions_grow_also_when_time_stands_still(store) -> None:
    await register(store)
    seen = [(await stored(store, commit(turn=1, request_id="a"))).revision]
    seen.append((await hit(store, request_id="b")).conversation.revision)
    seen.append(await store.give_back(key(), "handle-a", "b"))
    await miss(store, request_id="a")
    seen.append((await store.get(key())).revision)
    seen.append((await stored(store, commit(turn=9, request_id="c"))).revision)
    assert seen == sorted(set(seen))


async def test_ending_releases_the_handle(store) -> None:
    await register(store)
    await stored(store, commit(params=b"p"))
    assert await store.end(key()) == Ended(found=True, released=True)
    [release] = await releases(store)
    assert (release.cause, release.handle.params) == (ReleaseCause.ENDED, b"p")
    assert (await miss(store)).reason is MissReason.RELEASED
    assert await store.end(key()) == Ended(found=True, released=False)
    assert len(await releases(store)) == 1


async def test_a_turn_opened_before_the_end_loses_its_commit(store) -> None:
    await register(store)
    await stored(store, commit(turn=1, request_id="a"))
    taken = await hit(store, request_id="b")
    assert await store.end(key()) == Ended(found=True, released=False)
    verdict = await store.commit(commit(turn=taken.turn, request_id="b"), "h")
    assert verdict == Superseded(newest_turn=1, ended=True)


async def test_a_turn_opened_after_the_end_restarts_the_conversation(store) -> None:
    await register(store)
    await stored(store, commit(turn=1, request_id="a"))
    await store.end(key())
    opened = await miss(store, request_id="b")
    assert opened.reason is MissReason.RELEASED
    await stored(store, commit(turn=opened.turn, request_id="b"))
    assert (await hit(store, request_id="c")).conversation.turn == opened.turn


async def test_a_first_turn_still_running_when_its_conversation_ends_loses(store) -> None:
    await register(store)
    opened = await miss(store, request_id="a")
    assert await store.end(key()) == Ended(found=False, released=False)
    verdict = await store.commit(commit(turn=opened.turn, request_id="a"), "h")
    assert verdict == Superseded(newest_turn=0, ended=True)
    assert await store.get(key()) is None
    restarted = await miss(store, request_id="b")
    assert (restarted.turn, restarted.reason) == (2, MissReason.FIRST_TURN)
    await stored(store, commit(turn=2, request_id="b"))


async def test_a_turn_of_unknown_age_loses_to_an_end_until_a_turn_is_opened(store) -> None:
    await register(store)
    await stored(store, commit(turn=1, request_id="a"))
    await store.end(key())
    verdict = await store.commit(commit(turn=0, request_id="b"), "h")
    assert verdict == Superseded(newest_turn=1, ended=True)
    await miss(store, request_id="c")
    assert (await stored(store, commit(turn=0, request_id="b"))).turn == 3


async def test_a_handle_returned_after_the_end_is_released(store) -> None:
    await register(store)
    await stored(store, commit(request_id="a"))
    await hit(store, request_id="b")
    await store.end(key())
    assert await releases(store) == []  # a prefill engine may be reading the blocks
    assert await store.give_back(key(), "handle-a", "b") is not None
    assert (await store.get(key())).state is HandleState.RELEASED
    assert [release.cause for release in await releases(store)] == [ReleaseCause.ENDED]


async def test_a_conversation_ttl_moves_the_deadline_and_outlives_turns(store, clock) -> None:
    await register(store)
    await stored(store, commit(request_id="a"))
    row = await store.extend(key(), 60 * SECOND)
    assert row.expire_time_us == START_US + 60 * SECOND
    clock.advance(59)
    taken = await hit(store, request_id="b")
    row = await stored(store, commit(turn=taken.turn, request_id="b"))
    assert row.expire_time_us == clock.us + 60 * SECOND
    row = await store.extend(key(), 475 * SECOND)
    assert row.expire_time_us == clock.us + 475 * SECOND


async def test_a_conversation_that_starts_again_has_no_ttl_of_its_own(store) -> None:
    await register(store)
    await stored(store, commit(turn=1, request_id="a"))
    await store.extend(key(), 60 * SECOND)
    await store.end(key())
    opened = await miss(store, request_id="b")
    row = await stored(store, commit(turn=opened.turn, request_id="b"))
    assert (row.conversation_ttl_us, row.expire_time_us) == (None, START_US + 475 * SECOND)


async def test_a_ttl_longer_than_the_engine_keeps_blocks_is_refused(store) -> None:
    await register(store)
    before = await stored(store, commit(engine_ttl_seconds=480))
    outcome = await store.extend(key(), 475 * SECOND + 1)
    assert outcome == TtlNotHonoured(before)
    assert await store.get(key()) == before


async def test_a_longer_ttl_does_not_revive_an_expired_handle(store, clock) -> None:
    await register(store)
    await stored(store, commit())
    await store.extend(key(), 10 * SECOND)
    clock.advance(10)
    await store.extend(key(), 400 * SECOND)
    assert (await miss(store)).reason is MissReason.EXPIRED


async def test_the_ttl_of_an_unknown_conversation_cannot_be_set(store) -> None:
    assert await store.extend(key(), SECOND) is None
    await store.end(key())
    assert await store.extend(key(), SECOND) is None


async def test_a_tenant_cannot_exceed_its_limit_of_conversations(store) -> None:
    await register(store)
    for number in range(POLICY.max_conversations):
        await store.end(key(f"c-{number}"))
    assert await store.commit(commit(key("one-more")), "h") == TooManyConversations()
    assert await store.get(key("one-more")) is None
    await store.end(key("one-more"))  # leaves no row either
    await stored(store, commit(key("c-0"), turn=2))
    await stored(store, commit(key("one-more", tenant="u")))


async def test_forgotten_conversations_make_room_for_new_ones(store, clock) -> None:
    await register(store)
    for number in range(POLICY.max_conversations):
        await store.end(key(f"c-{number}"))
    clock.advance(3600)
    await store.sweep(1)
    await stored(store, commit(key("one-more")))
    assert await store.commit(commit(key("two-more")), "h") == TooManyConversations()
