"""The same conversations, held several ways in random order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvloop.bench.outputs import check_outputs
from kvloop.bench.rounds import Progress, RoundPlan, Variant, run_rounds
from kvloop.bench.samples import Run, Shape
from tests.unit.bench.fakes import FakeClock, FakePrefill, FakeTurns

SHAPE = Shape(50, answer_tokens=8, message_tokens=5, turns=3, last_answer_tokens=4)


def _variants(turns: FakeTurns, prefill: FakePrefill | None = None) -> list[Variant]:
    return [
        Variant("on", turns, reuse=True, prefill=prefill),
        Variant("off", turns, reuse=False, prefill=prefill),
        Variant("control", turns, reuse=False, prefill=prefill),
    ]


async def _run(turns: FakeTurns, variants: list[Variant], plan: RoundPlan, seed: int = 1) -> Run:
    return await run_rounds(
        variants,
        plan,
        name="run",
        source=random.Random(seed),
        clock=turns.clock,
        sleep=turns.clock.sleep,
    )


async def test_every_way_gets_the_same_prompts() -> None:
    turns = FakeTurns()
    await _run(turns, _variants(turns), RoundPlan([SHAPE], repetitions=2, warm_ups=0))
    prompts: dict[str, list[tuple[int, ...]]] = {"on": [], "off": [], "control": []}
    for request in turns.requests:
        prompts[request.conversation.rpartition("-")[2]].append(tuple(request.prompt))
    assert prompts["on"] == prompts["off"] == prompts["control"]
    assert len(prompts["on"]) == 6
    assert len(set(prompts["on"])) == 6


async def test_each_prompt_extends_the_one_before_by_the_answer_and_a_message() -> None:
    turns = FakeTurns()
    run = await _run(turns, _variants(turns), RoundPlan([SHAPE], repetitions=1, warm_ups=0))
    prompts = [r.prompt for r in turns.requests if r.conversation.endswith("-on")]
    answers = [s.result.token_ids for s in run.samples if s.variant == "on" and s.result]
    assert [len(prompt) for prompt in prompts] == [50, 63, 76]
    assert prompts[1][:58] == (*prompts[0], *answers[0])
    assert prompts[2][:71] == (*prompts[1], *answers[1])
    assert [len(answer) for answer in answers] == [8, 8, 4]
    assert SHAPE.largest_prompt == 76


async def test_conversations_share_nothing_between_ways_or_repetitions() -> None:
    turns = FakeTurns()
    shape = replace(SHAPE, conversations=2)
    await _run(turns, _variants(turns), RoundPlan([shape, SHAPE], repetitions=2))
    names = {request.conversation for request in turns.requests}
    # shapes x repetitions and a warm-up x ways x conversations
    assert len(names) == 3 * 3 * 2 + 3 * 3 * 1
    assert set(turns.ended) == names


async def test_only_the_last_turn_is_marked_as_such() -> None:
    turns = FakeTurns()
    await _run(turns, _variants(turns)[:1], RoundPlan([SHAPE], repetitions=1, warm_ups=0))
    assert [request.last for request in turns.requests] == [False, False, True]
    assert all(request.reuse for request in turns.requests)


async def test_the_order_of_the_ways_changes() -> None:
    turns = FakeTurns()
    await _run(turns, _variants(turns), RoundPlan([SHAPE], repetitions=10, warm_ups=0))
    firsts = {request.conversation.rpartition("-")[2] for request in turns.requests[::3]}
    assert firsts == {"on", "off", "control"}


async def test_warm_ups_leave_no_samples() -> None:
    turns = FakeTurns()
    run = await _run(turns, _variants(turns), RoundPlan([SHAPE], repetitions=2, warm_ups=3))
    assert {sample.repetition for sample in run.samples} == {0, 1}
    assert len(run.samples) == 2 * 3 * 3
    assert len(run.rounds) == 2 * 3 * 3
    assert len(turns.requests) == 5 * 3 * 3


async def test_prefill_is_made_cold_before_each_round() -> None:
    turns, prefill = FakeTurns(), FakePrefill()
    plan = RoundPlan([SHAPE], repetitions=1, warm_ups=0)
    await _run(turns, _variants(turns, prefill), plan)
    assert prefill.resets == 9


async def test_warm_prefill_is_left_alone() -> None:
    turns, prefill = FakeTurns(), FakePrefill()
    plan = RoundPlan([SHAPE], repetitions=1, warm_ups=0, cold=False)
    await _run(turns, _variants(turns, prefill), plan)
    assert prefill.resets == 0


async def test_a_rounds_pulls_are_what_the_engine_counted_meanwhile() -> None:
    turns, prefill = FakeTurns(), FakePrefill()
    plan = RoundPlan([SHAPE], repetitions=1, warm_ups=0)
    run = await _run(turns, _variants(turns, prefill), plan)
    assert all(found.transfers is not None for found in run.rounds)
    assert {found.transfers.bytes for found in run.rounds if found.transfers} == {10.0}
    without = await _run(turns, _variants(turns), plan)
    assert {found.transfers for found in without.rounds} == {None}


async def test_a_failed_turn_is_a_sample_and_the_run_goes_on() -> None:
    turns = FakeTurns(failing="-off")
    run = await _run(turns, _variants(turns), RoundPlan([SHAPE], repetitions=1, warm_ups=0))
    failed = [sample for sample in run.samples if sample.error is not None]
    assert {sample.variant for sample in failed} == {"off"}
    assert failed[0].error == "UNAVAILABLE: it is away"
    assert len(run.samples) == 9


async def test_the_history_goes_on_when_the_leading_way_fails() -> None:
    turns = FakeTurns(failing="-on")
    await _run(turns, _variants(turns), RoundPlan([SHAPE], repetitions=1, warm_ups=0))
    lengths = [len(r.prompt) for r in turns.requests if r.conversation.endswith("-off")]
    assert lengths == [50, 63, 76]


async def test_answers_that_differ_with_reuse_show_beside_the_control() -> None:
    turns = FakeTurns(wrong_when_reusing=True)
    run = await _run(turns, _variants(turns), RoundPlan([SHAPE], repetitions=2, warm_ups=0))
    checks = {check.variant: check for check in check_outputs(run)}
    assert set(checks) == {"on", "control"}
    assert (checks["on"].compared, checks["on"].equal) == (4, 0)
    assert sorted(checks["on"].first_differences) == [3, 3, 7, 7]
    assert (checks["control"].compared, checks["control"].equal) == (4, 4)


async def test_progress_counts_all_rounds() -> None:
    turns = FakeTurns()
    told: list[Progress] = []
    await run_rounds(
        _variants(turns),
        RoundPlan([SHAPE], repetitions=2, warm_ups=1),
        name="run",
        source=random.Random(1),
        clock=turns.clock,
        sleep=turns.clock.sleep,
        on_progress=told.append,
    )
    assert [progress.done for progress in told] == list(range(1, 28))
    assert {progress.total for progress in told} == {27}
    assert told[0].repetition == -1


async def test_a_run_stops_between_repetitions() -> None:
    turns = FakeTurns()
    begun = 0

    def stop() -> bool:
        nonlocal begun
        begun += 1
        return begun > 2

    run = await run_rounds(
        _variants(turns),
        RoundPlan([SHAPE], repetitions=5, warm_ups=0),
        name="run",
        source=random.Random(1),
        clock=turns.clock,
        sleep=turns.clock.sleep,
        stop=stop,
    )
    assert {sample.repetition for sample in run.samples} == {0, 1}


async def test_gaps_between_turns_are_kept() -> None:
    clock = FakeClock()
    turns = FakeTurns(clock)
    plan = RoundPlan([SHAPE], repetitions=1, warm_ups=0, settle_seconds=0.0, think_seconds=7.0)
    await _run(turns, _variants(turns)[:1], plan)
    assert clock.slept.count(7.0) == 2


@pytest.mark.parametrize("serial", [True, False])
async def test_last_turns_run_one_after_another_if_wanted(serial: bool) -> None:
    turns = FakeTurns()
    shape = replace(SHAPE, conversations=3)
    plan = RoundPlan([shape], repetitions=1, warm_ups=0, serial_last=serial)
    run = await _run(turns, _variants(turns)[:1], plan)
    assert len([sample for sample in run.samples if sample.turn == 3]) == 3


@pytest.mark.parametrize(
    "values",
    [
        {"turns": 1},
        {"context_tokens": 0},
        {"answer_tokens": 0},
        {"conversations": 0},
        {"last_answer_tokens": 0},
    ],
)
def test_a_shape_without_sense_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="least"):
        Shape(**({"context_tokens": 10} | values))


@pytest.mark.parametrize("values", [{"repetitions": 0}, {"warm_ups": -1}, {"vocabulary": 10}])
def test_a_plan_without_sense_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"there is|vocabulary"):
        RoundPlan([SHAPE], **values)  # type: ignore[arg-type]
