"""What every store does about taking handles and giving them back."""

from __future__ import annotations

import asyncio

import pytest

from services.kvmeta.model import EngineRef, HandleState, MissReason
from services.kvmeta.store import Hit
from tests.contract.kvmeta_stores import commit, hit, key, miss, register, stored, worker


async def test_an_unknown_conversation_opens_turn_1_and_leaves_no_row(store) -> None:
    outcome = await miss(store)
    assert (outcome.turn, outcome.reason) == (1, MissReason.FIRST_TURN)
    assert outcome.last_worker_id == ""
    assert await store.get(key()) is None


async def test_a_take_gives_the_params_byte_for_byte(store) -> None:
    params = b'{"tp":1,"remote_block_ids":[[3,null],[7]],"deadline":1.50,"x":"\xc3\xa9\x00"}'
    await register(store)
    row = await stored(store, commit(params=params))
    outcome = await hit(store)
    assert outcome.params == params
    assert outcome.turn == 2
    assert outcome.conversation.handle_id == row.handle_id
    assert outcome.conversation.state is HandleState.TAKEN
    assert (await store.get(key())).state is HandleState.TAKEN


async def test_of_many_concurrent_takers_one_gets_the_handle(store) -> None:
    await register(store)
    await stored(store, commit())
    outcomes = await asyncio.gather(*(store.take(key(), f"taker-{n}") for n in range(64)))
    hits = [outcome for outcome in outcomes if isinstance(outcome, Hit)]
    assert len(hits) == 1
    reasons = {outcome.reason for outcome in outcomes if not isinstance(outcome, Hit)}
    assert reasons == {MissReason.TAKEN}
    assert sorted(outcome.turn for outcome in outcomes) == list(range(2, 66))


async def test_a_repeated_take_by_the_holder_gives_the_same_answer(store) -> None:
    await register(store)
    await stored(store, commit())
    first = await hit(store)
    await miss(store, request_id="someone-else")
    assert await store.take(key(), "r2") == Hit(first.turn, await store.get(key()), first.params)


async def test_a_repeated_take_opens_no_further_turn(store) -> None:
    await register(store)
    await stored(store, commit())
    await hit(store)
    await hit(store)
    assert (await miss(store, request_id="next")).turn == 3


async def test_concurrent_repeats_of_one_take_give_one_answer(store) -> None:
    await register(store)
    await stored(store, commit())
    outcomes = await asyncio.gather(*(store.take(key(), "r2") for _ in range(8)))
    assert {outcome.turn for outcome in outcomes} == {2}
    assert all(isinstance(outcome, Hit) for outcome in outcomes)


async def test_the_turn_that_committed_cannot_take_its_own_handle(store) -> None:
    await register(store)
    await stored(store, commit(request_id="r1"))
    assert (await miss(store, request_id="r1")).reason is MissReason.SPENT
    await hit(store, request_id="r2")


async def test_a_handle_is_not_given_out_after_its_deadline(store, clock) -> None:
    await register(store)
    await stored(store, commit(engine_ttl_seconds=480))  # margin 5 s
    clock.advance(475)
    outcome = await miss(store)
    assert outcome.reason is MissReason.EXPIRED
    assert outcome.last_worker_id == "d1"


async def test_a_handle_is_given_out_until_just_before_its_deadline(store, clock) -> None:
    await register(store)
    await stored(store, commit(engine_ttl_seconds=480))
    clock.advance(474.999999)
    await hit(store)


async def test_the_margin_is_a_tenth_of_a_short_ttl(store, clock) -> None:
    await register(store)
    await stored(store, commit(engine_ttl_seconds=4))
    clock.advance(3.59)
    await hit(store)
    await stored(store, commit(request_id="r3", engine_ttl_seconds=4))
    clock.advance(3.6)
    assert (await miss(store, request_id="r4")).reason is MissReason.EXPIRED


async def test_a_handle_taken_by_another_is_a_miss_taken_then_spent(store, clock) -> None:
    await register(store)
    await stored(store, commit())
    await hit(store)
    assert (await miss(store, request_id="r3")).reason is MissReason.TAKEN
    clock.advance(475)
    assert (await miss(store, request_id="r3")).reason is MissReason.SPENT


async def test_the_holder_cannot_repeat_its_take_after_the_deadline(store, clock) -> None:
    await register(store)
    await stored(store, commit())
    await hit(store)
    clock.advance(475)
    assert (await miss(store)).reason is MissReason.SPENT


@pytest.mark.parametrize("gone", ["lease ran out", "deregistered", "engine restarted"])
async def test_a_handle_whose_engine_is_gone_is_a_miss_void(store, clock, gone) -> None:
    lease_id = await register(store, lease_us=100)
    await stored(store, commit())
    if gone == "lease ran out":
        clock.us += 100
    elif gone == "deregistered":
        await store.end_lease(lease_id)
    else:
        await register(store, worker(engine=EngineRef("engine-1", "epoch-2")))
    outcome = await miss(store)
    assert outcome.reason is MissReason.VOID
    assert outcome.last_worker_id == ("d1" if gone == "engine restarted" else "")


async def test_a_returned_handle_can_be_taken_again(store) -> None:
    await register(store)
    await stored(store, commit())
    first = await hit(store, request_id="r2")
    revision = await store.give_back(key(), first.conversation.handle_id, "r2")
    assert revision > first.conversation.revision
    second = await hit(store, request_id="r3")
    assert second.conversation.handle_id == first.conversation.handle_id
    assert second.params == first.params
    assert second.turn == first.turn + 1


@pytest.mark.parametrize(
    ("handle_id", "request_id"), [("handle-r1", "other"), ("other", "r2"), ("", "")]
)
async def test_only_the_holder_of_a_handle_can_return_it(store, handle_id, request_id) -> None:
    await register(store)
    await stored(store, commit())
    await hit(store, request_id="r2")
    assert await store.give_back(key(), handle_id, request_id) is None
    assert (await store.get(key())).state is HandleState.TAKEN


async def test_a_handle_nobody_holds_cannot_be_returned(store) -> None:
    await register(store)
    assert await store.give_back(key(), "handle-r1", "r2") is None
    await stored(store, commit())
    assert await store.give_back(key(), "handle-r1", "") is None
    assert await store.give_back(key(), "handle-r1", "r1") is None


async def test_a_handle_is_returned_once(store) -> None:
    await register(store)
    await stored(store, commit())
    await hit(store, request_id="r2")
    results = await asyncio.gather(*(store.give_back(key(), "handle-r1", "r2") for _ in range(4)))
    assert len([revision for revision in results if revision is not None]) == 1


async def test_a_handle_cannot_be_returned_after_its_deadline(store, clock) -> None:
    await register(store)
    await stored(store, commit())
    await hit(store)
    clock.advance(475)
    assert await store.give_back(key(), "handle-r1", "r2") is None


async def test_a_voided_handle_cannot_be_returned(store) -> None:
    await register(store)
    await stored(store, commit())
    await hit(store)
    await register(store, worker(engine=EngineRef("engine-1", "epoch-2")))
    assert await store.give_back(key(), "handle-r1", "r2") is None


async def test_another_tenant_or_model_cannot_take_the_handle(store) -> None:
    await register(store)
    await stored(store, commit(key()))
    for other in (key(tenant="u"), key(model="n"), key("C")):
        outcome = await miss(store, other)
        assert (outcome.turn, outcome.reason) == (1, MissReason.FIRST_TURN)
    await hit(store)
