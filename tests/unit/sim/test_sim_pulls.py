"""Pulls, pins and events between engines, and what goes wrong when they are misused."""

from __future__ import annotations

import pytest

from services.sim.blocks import FreedReads
from services.sim.core import EngineCore
from services.sim.faults import Fault, FaultKind
from services.sim.latency import PROFILES, Preset
from services.sim.sequence import Ending, Phase
from services.sim.spec import LoadFailurePolicy
from tests.unit.sim.lab import BLOCK, FIRST_PREFILL, TTL, Lab, finish, prompt_of, recomputed


def _crowd_out(core: EngineCore) -> list[list[int]]:
    """Prompts that together use every free block of an engine."""
    room = core.pool.num_free * BLOCK
    size = core.spec.max_model_len - 64
    return [prompt_of(min(size, room - start), seed=start + 9) for start in range(0, room, size)]


async def test_two_turns_pull_both_ways_and_equal_a_recompute(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt)
    assert first.tokens == await recomputed(lab, prompt)
    history = [*prompt, *first.tokens, *prompt_of(30, seed=3)]
    fresh = lab.engine()  # any prefill engine can pull
    handed, second = await lab.turn(fresh, decode, history, handle=first.params)
    assert second.tokens == await recomputed(lab, history)
    report = handed.params["kvloop_report"]
    assert report == {
        "prompt_tokens": 570,
        "proven_tokens": 539,
        "pulled_tokens": 539,
        "cached_tokens": 0,
        "recomputed_tokens": 31,
        "miss_reason": None,
        "pull_seconds": 0.0,
        "expected_pull_seconds": None,
        "expected_recompute_seconds": None,
    }
    assert fresh.stats.nixl_bytes_transferred.sum == 34 * BLOCK * 4096


async def test_prefill_pulls_only_what_its_cache_lacks(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt, max_tokens=200)
    history = [*prompt, *first.tokens, *prompt_of(30, seed=3)]
    handed, second = await lab.turn(prefill, decode, history, handle=first.params)
    report = handed.params["kvloop_report"]
    assert (report["cached_tokens"], report["pulled_tokens"]) == (496, 203)
    assert second.tokens == await recomputed(lab, history)


@pytest.mark.parametrize(
    ("change", "proven"),
    [
        (lambda prompt, answer: [*prompt, *answer[:50], *answer[100:], 5], 544),
        (lambda prompt, answer: [*prompt[:300], 999, *prompt[301:], *answer, 5], 288),
        (lambda prompt, answer: prompt[:400], 384),
        (lambda prompt, answer: [999, *prompt[1:], *answer], 0),
    ],
    ids=["middle of the answer removed", "edited", "shortened", "edited at the start"],
)
async def test_an_edited_history_is_pulled_as_far_as_it_is_proven(
    lab: Lab, change, proven: int
) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt, max_tokens=200)
    history = change(prompt, first.tokens)
    handed, second = await lab.turn(lab.engine(), decode, history, handle=first.params)
    assert second.tokens == await recomputed(lab, history)
    report = handed.params["kvloop_report"]
    assert report["proven_tokens"] == proven
    assert report["miss_reason"] == (None if proven else "PREFIX_MISMATCH")
    # D's blocks are free: what is left is P's pin and D's new one.
    assert len(decode.pins.all(decode.now())) == 1


async def test_stock_connector_gives_wrong_text_for_an_edited_history(lab: Lab) -> None:
    prefill, decode = lab.engine(stock=True), lab.engine(stock=True)
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt, max_tokens=200)
    history = [*prompt, *first.tokens[:50], *first.tokens[100:], 5]
    _, second = await lab.turn(lab.engine(stock=True), decode, history, handle=first.params)
    assert second.ending is Ending.LENGTH
    assert second.tokens != await recomputed(lab, history)


async def test_stock_connector_is_right_for_a_history_that_extends(lab: Lab) -> None:
    prefill, decode = lab.engine(stock=True), lab.engine(stock=True)
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt, max_tokens=200)
    history = [*prompt, *first.tokens, 5, 6, 7]
    _, second = await lab.turn(lab.engine(stock=True), decode, history, handle=first.params)
    assert second.tokens == await recomputed(lab, history)
    assert lab.events == []


async def test_a_shorter_history_is_wrong_with_stock_because_blocks_align_at_the_end(
    lab: Lab,
) -> None:
    prefill, decode = lab.engine(stock=True), lab.engine(stock=True)
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt, max_tokens=200)
    history = prompt[:400]
    _, second = await lab.turn(lab.engine(stock=True), decode, history, handle=first.params)
    assert second.tokens != await recomputed(lab, history)


async def test_the_same_handle_used_twice_gives_wrong_text(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt)
    history = [*prompt, *first.tokens, 5]
    expected = await recomputed(lab, history, 1)
    handle = first.params
    once = await lab.ask(lab.engine(), history, max_tokens=1, params=handle)
    assert once.tokens == expected
    twice = await lab.ask(lab.engine(), history, max_tokens=1, params=handle)
    assert twice.tokens != expected
    assert twice.ending is Ending.LENGTH
    assert twice.params["kvloop_report"]["pulled_tokens"] == 539
    assert decode.pins.unknown_notifications == 1


async def test_stale_reads_stay_right_until_the_blocks_have_a_new_owner(lab: Lab) -> None:
    decode = lab.engine(freed_reads=FreedReads.STALE, num_blocks=300)
    prompt = prompt_of(500)
    _, first = await lab.turn(lab.engine(), decode, prompt)
    history = [*prompt, *first.tokens, 5]
    expected = await recomputed(lab, history, 1)
    handle = first.params
    for _ in range(2):
        answer = await lab.ask(lab.engine(), history, max_tokens=1, params=handle)
        assert answer.tokens == expected
    for other in _crowd_out(decode):
        await lab.ask(decode, other, max_tokens=1)
    late = await lab.ask(lab.engine(), history, max_tokens=1, params=handle)
    assert late.tokens != expected


async def test_a_pin_falls_at_its_deadline(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    await lab.turn(prefill, decode, prompt_of(500))
    assert len(decode.pins.all(decode.now())) == 1
    used = decode.pool.num_used
    await lab.clock.advance(TTL - 1)
    assert decode.pool.num_used == used
    await lab.clock.advance(2)
    assert decode.pins.all(decode.now()) == []
    assert decode.pool.num_used == 0
    assert decode.pins.expired == 1


async def test_a_read_near_the_deadline_is_declined(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt)
    history = [*prompt, *first.tokens, 5]
    await lab.clock.advance(TTL - 4)
    reader = lab.engine()
    answer = await lab.ask(reader, history, max_tokens=1, params=first.params)
    assert answer.tokens == await recomputed(lab, history, 1)
    report = answer.params["kvloop_report"]
    assert (report["miss_reason"], report["pulled_tokens"]) == ("ENGINE_EXPIRED", 0)
    assert reader.stats.nixl_num_declined_reads == 1


async def test_without_the_deadline_in_the_params_an_expired_read_is_wrong(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt)
    history = [*prompt, *first.tokens, 5]
    await lab.clock.advance(TTL + 1)
    handle = {k: v for k, v in first.params.items() if k != "remote_blocks_expiry_time"}
    answer = await lab.ask(lab.engine(), history, max_tokens=1, params=handle)
    assert answer.tokens != await recomputed(lab, history, 1)


async def test_a_release_frees_the_pin_at_once(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    _, first = await lab.turn(prefill, decode, prompt_of(500))
    decode.release(["unknown", first.params["remote_request_id"]])
    assert decode.pool.num_used == 0


async def test_a_turn_that_nobody_wants_to_keep_is_not_pinned(lab: Lab) -> None:
    decode = lab.engine()
    params = {"kvloop_turn_id": "t", "kvloop_retain": False, "do_remote_prefill": False}
    answer = await lab.ask(decode, prompt_of(50), params=params)
    assert answer.handed_over is None
    assert decode.pool.num_used == 0
    assert [(event["turn_id"], event["retained"]) for event in lab.events] == [("t", False)]


async def test_a_finished_turn_is_reported_with_its_handle_last(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    _, answer = await lab.turn(prefill, decode, prompt_of(50), max_tokens=10)
    (event,) = lab.events
    assert list(event)[-1] == "params"
    assert event["params"] == answer.params
    assert (event["num_tokens"], event["num_blocks"]) == (59, 4)
    assert (event["retained"], event["ttl_seconds"]) == (True, TTL)


async def test_an_aborted_turn_is_reported_as_not_retained(lab: Lab) -> None:
    decode = lab.engine(profile=PROFILES[Preset.TINY_CPU], has_sidecar=False)
    params = {"kvloop_turn_id": "t", "do_remote_prefill": False, "do_remote_decode": False}
    sequence = lab.sequence(decode, prompt_of(50), max_tokens=1000, params=params)
    decode.submit(sequence)
    await lab.clock.advance(1)
    decode.abort(sequence)
    assert [(event["turn_id"], event["retained"]) for event in lab.events] == [("t", False)]


async def test_stock_never_frees_a_turn_that_computed_its_ownprompt_of(lab: Lab) -> None:
    decode = lab.engine(stock=True)
    params = {"do_remote_prefill": False, "do_remote_decode": False}
    answer = await lab.ask(decode, prompt_of(50), params=params)
    decode.release([answer.params["remote_request_id"]])
    await lab.clock.advance(10 * TTL)
    assert decode.pins.all(decode.now())[0].deadline is None
    assert decode.pool.num_used > 0


@pytest.mark.parametrize("kind", [FaultKind.LOSE_HANDSHAKE, FaultKind.FAIL_TRANSFER])
async def test_a_failed_pull_isrecomputed(lab: Lab, kind: FaultKind) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt)
    history = [*prompt, *first.tokens, 5]
    reader = lab.engine()
    answer = await lab.ask(reader, history, max_tokens=1, params=first.params, faults=[Fault(kind)])
    assert answer.tokens == await recomputed(lab, history, 1)
    report = answer.params["kvloop_report"]
    assert (report["miss_reason"], report["recomputed_tokens"]) == ("PULL_FAILED", 541)
    assert reader.pool.num_used == len(answer.params["remote_block_ids"][0])


async def test_a_failed_pull_fails_the_request_if_the_policy_says_so(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt)
    reader = lab.engine(load_failure_policy=LoadFailurePolicy.FAIL)
    fault = Fault(FaultKind.FAIL_TRANSFER)
    answer = await lab.ask(
        reader, [*prompt, *first.tokens, 5], max_tokens=1, params=first.params, faults=[fault]
    )
    assert (answer.ending, answer.handed_over) == (Ending.ERROR, None)
    assert reader.pool.num_used == 0


async def test_a_restarted_peer_is_noticed(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt)
    lab.engine(side_channel_port=decode.spec.side_channel_port)  # a new life at its place
    history = [*prompt, *first.tokens, 5]
    answer = await lab.ask(lab.engine(), history, max_tokens=1, params=first.params)
    assert answer.tokens == await recomputed(lab, history, 1)
    assert answer.params["kvloop_report"]["miss_reason"] == "PULL_FAILED"


async def test_an_abort_during_a_pull_keeps_its_blocks_until_the_pull_has_ended(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt)
    reader = lab.engine(profile=PROFILES[Preset.TINY_CPU])
    sequence = lab.sequence(reader, [*prompt, *first.tokens, 5], max_tokens=1, params=first.params)
    reader.submit(sequence)
    await lab.clock.advance(0.02)
    assert sequence.phase is Phase.LOADING
    assert reader.scheduler.num_waiting == 1
    reader.abort(sequence)
    assert reader.pool.num_used > 0
    await lab.clock.advance(1)
    assert reader.pool.num_used == 0


async def test_an_abort_before_the_pull_frees_prefills_blocks(lab: Lab) -> None:
    prefill = lab.engine()
    decode = lab.engine(max_num_seqs=1, profile=PROFILES[Preset.TINY_CPU])
    decode.submit(lab.sequence(decode, prompt_of(20), max_tokens=2000))
    handed = await lab.ask(prefill, prompt_of(500), max_tokens=1, params=FIRST_PREFILL)
    assert prefill.pool.num_used > 0
    waiting = lab.sequence(decode, prompt_of(500), params=handed.params)
    decode.submit(waiting)
    await lab.clock.advance(0.1)
    decode.abort(waiting)
    await lab.clock.advance(0.1)
    assert prefill.pool.num_used == 0


async def test_prefills_blocks_live_as_long_as_decode_has_not_read_them(lab: Lab) -> None:
    prefill = lab.engine()
    decode = lab.engine(max_num_seqs=1, profile=PROFILES[Preset.TINY_CPU])
    busy = lab.sequence(decode, prompt_of(20), max_tokens=4000)
    decode.submit(busy)
    prompt = prompt_of(500)
    handed = await lab.ask(prefill, prompt, max_tokens=1, params=FIRST_PREFILL)
    late = lab.sequence(decode, prompt, params=handed.params, max_tokens=40)
    decode.submit(late)
    await lab.clock.advance(45)
    assert late.phase is Phase.WAITING
    assert len(prefill.pins.all(prefill.now())) == 1
    decode.abort(busy)
    answer = await lab.clock.run(finish(late))
    assert answer.tokens == await recomputed(lab, prompt)


async def test_prefills_blocks_fall_after_the_lease_if_nobody_comes(lab: Lab) -> None:
    prefill = lab.engine()
    await lab.ask(prefill, prompt_of(500), max_tokens=1, params=FIRST_PREFILL)
    await lab.clock.advance(29)
    assert prefill.pool.num_used > 0
    await lab.clock.advance(2)
    assert prefill.pins.all(prefill.now()) == []
    assert prefill.pool.num_used == 0


async def test_below_the_threshold_nothing_is_pulled_but_the_pin_falls(lab: Lab) -> None:
    prefill, decode = lab.engine(), lab.engine()
    prompt = prompt_of(500)
    _, first = await lab.turn(prefill, decode, prompt, max_tokens=20)
    history = [*prompt, *first.tokens, 5]
    answer = await lab.ask(prefill, history, max_tokens=1, params=first.params)
    report = answer.params["kvloop_report"]
    assert (report["miss_reason"], report["cached_tokens"]) == ("BELOW_THRESHOLD", 496)
    assert answer.tokens == await recomputed(lab, history, 1)
    assert decode.pins.all(decode.now()) == []
