"""The engine core: the model, the prefix cache, batching, and room for all."""

from __future__ import annotations

from services.sim.latency import PROFILES, Preset
from services.sim.sequence import Ending, Phase, Sampling
from services.sim.tokenizer import EOS_ID
from tests.unit.sim.lab import BLOCK, FIRST_PREFILL, TTL, Lab, finish, prompt_of, recomputed


async def test_the_same_prompt_gives_the_same_answer_on_any_engine(lab: Lab) -> None:
    prompt = prompt_of(100)
    answers = [await lab.ask(lab.engine(), prompt, max_tokens=50) for _ in range(2)]
    assert answers[0].tokens == answers[1].tokens
    assert len(set(answers[0].tokens)) > 25
    other_model = await lab.ask(lab.engine(model="other"), prompt, max_tokens=50)
    assert other_model.tokens != answers[0].tokens


async def test_the_answer_does_not_depend_on_how_the_prompt_was_cut_into_steps(lab: Lab) -> None:
    prompt = prompt_of(300)
    whole = await lab.ask(lab.engine(), prompt)
    pieces = await lab.ask(lab.engine(max_num_batched_tokens=7), prompt)
    assert whole.tokens == pieces.tokens


async def test_one_token_changed_anywhere_changes_the_answer(lab: Lab) -> None:
    prompt = prompt_of(100)
    expected = await recomputed(lab, prompt)
    for position in (0, 50, 99):
        changed = [*prompt[:position], 999, *prompt[position + 1 :]]
        assert await recomputed(lab, changed) != expected


async def test_the_prefix_cache_is_used_and_changes_nothing(lab: Lab) -> None:
    engine = lab.engine()
    prompt = prompt_of(100)
    first = await lab.ask(engine, prompt)
    second = await lab.ask(engine, prompt)
    assert second.tokens == first.tokens
    assert second.sequence.cached_tokens == 96
    assert engine.stats.prefix_cache_hits == 96


async def test_a_prompt_that_is_cached_whole_computes_its_last_block_again(lab: Lab) -> None:
    engine = lab.engine()
    prompt = prompt_of(4 * BLOCK)
    await lab.ask(engine, prompt)
    again = await lab.ask(engine, prompt)
    assert again.sequence.cached_tokens == 3 * BLOCK


async def test_another_cache_salt_finds_nothing_but_says_the_same(lab: Lab) -> None:
    engine = lab.engine()
    prompt = prompt_of(100)
    first = await lab.ask(engine, prompt, salt="a")
    second = await lab.ask(engine, prompt, salt="b")
    assert second.sequence.cached_tokens == 0
    assert second.tokens == first.tokens


async def test_answers_end_by_themselves_unless_told_not_to(lab: Lab) -> None:
    engine = lab.engine(answer_tokens=10)
    ended = await lab.ask(engine, prompt_of(20), max_tokens=1000)
    assert ended.ending is Ending.STOP
    assert ended.tokens[-1] == EOS_ID
    assert len(ended.tokens) < 200
    sampling = Sampling(max_tokens=300, ignore_eos=True)
    ignored = await lab.ask(engine, prompt_of(20), sampling=sampling)
    assert (ignored.ending, len(ignored.tokens)) == (Ending.LENGTH, 300)
    assert EOS_ID not in ignored.tokens
    sampling = Sampling(max_tokens=300, min_tokens=250)
    assert len((await lab.ask(engine, prompt_of(20), sampling=sampling)).tokens) >= 250


async def test_a_stop_token_ends_the_answer_after_min_tokens(lab: Lab) -> None:
    engine = lab.engine()
    free = (await lab.ask(engine, prompt_of(20), max_tokens=30)).tokens
    place = next(i for i, token in enumerate(free) if i > 5 and token not in free[:i])
    sampling = Sampling(max_tokens=30, stop_token_ids=frozenset({free[place]}))
    assert (await lab.ask(engine, prompt_of(20), sampling=sampling)).tokens == free[: place + 1]


async def test_more_requests_than_sequence_slots_wait_in_order(lab: Lab) -> None:
    engine = lab.engine(max_num_seqs=2, profile=PROFILES[Preset.TINY_CPU])
    sequences = [lab.sequence(engine, prompt_of(20, seed=i), max_tokens=10) for i in range(4)]
    for sequence in sequences:
        engine.submit(sequence)
    await lab.clock.advance(0.06)
    assert len(engine.scheduler.running) == 2
    assert engine.scheduler.num_waiting == 2
    for sequence in sequences:
        await lab.clock.run(finish(sequence))
    started = [sequence.first_token_at or 0.0 for sequence in sequences]
    assert started == sorted(started)
    assert started[1] < started[2]


async def test_without_room_the_last_one_gives_way_and_still_answers_right(lab: Lab) -> None:
    engine = lab.engine(num_blocks=13, max_model_len=192)
    expected = [await recomputed(lab, prompt_of(60, seed=i), 60) for i in range(3)]
    sequences = [lab.sequence(engine, prompt_of(60, seed=i), max_tokens=60) for i in range(3)]
    for sequence in sequences:
        engine.submit(sequence)
    answers = [await lab.clock.run(finish(sequence)) for sequence in sequences]
    assert engine.stats.num_preemptions > 0
    assert [answer.tokens for answer in answers] == expected
    assert engine.pool.num_used == 0


async def test_an_abort_frees_everything(lab: Lab) -> None:
    engine = lab.engine(profile=PROFILES[Preset.TINY_CPU])
    running = lab.sequence(engine, prompt_of(50), max_tokens=1000, params=FIRST_PREFILL)
    engine.submit(running)
    await lab.clock.advance(1.0)
    assert running.phase is Phase.RUNNING
    engine.abort(running)
    assert engine.pool.num_used == 0
    answer = await lab.clock.run(finish(running))
    assert (answer.ending, answer.handed_over) == (Ending.ABORT, None)


async def test_requests_wait_while_pins_hold_all_blocks(lab: Lab) -> None:
    decode = lab.engine(num_blocks=40, max_model_len=600)
    params = {"kvloop_turn_id": "t", "do_remote_prefill": False, "do_remote_decode": False}
    await lab.ask(decode, prompt_of(500), params=params)
    waiting = lab.sequence(decode, prompt_of(300, seed=5))
    decode.submit(waiting)
    await lab.clock.advance(TTL - 10)
    assert waiting.phase is Phase.WAITING
    await lab.clock.advance(11)
    assert waiting.ended


async def test_the_prefix_cache_is_not_reset_while_blocks_are_in_use(lab: Lab) -> None:
    prefill = lab.engine()
    await lab.ask(prefill, prompt_of(100), max_tokens=1, params=FIRST_PREFILL)
    assert not prefill.reset_prefix_cache()
    await lab.clock.advance(31)
    assert prefill.reset_prefix_cache()
    assert (await lab.ask(prefill, prompt_of(100))).sequence.cached_tokens == 0
