"""Workloads: when conversations come, and how they are held."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

import pytest

from kvloop.bench.arrivals import Arrivals
from kvloop.bench.outputs import check_outputs
from kvloop.bench.rounds import Variant
from kvloop.bench.samples import KvBlocks, Run
from kvloop.bench.schedule import Advance, SchedulePlan, run_schedule
from kvloop.bench.scripts import Draw, Script, ScriptedTurn, TokenStreams, synthetic
from kvloop.bench.turns import TurnRequest, TurnResult
from kvloop.errors import UnavailableError
from tests.unit.bench.fakes import FakePrefill, FakeTurns


def _script(name: str, *, start: float | None = None, turns: int = 2, pause: float = 0) -> Script:
    made = [
        ScriptedTurn((Draw(f"{name}/{number}", 0, 20),), 4, pause if number else 0.0)
        for number in range(turns)
    ]
    return Script(name, tuple(made), start)


def _recorded(name: str, *times: float) -> Script:
    made = [ScriptedTurn((Draw(name, 0, 5),), 2, at_seconds=at) for at in times]
    return Script(name, tuple(made), times[0])


def _variants(turns: FakeTurns, prefill: FakePrefill | None = None) -> list[Variant]:
    return [
        Variant("on", turns, reuse=True, prefill=prefill),
        Variant("off", turns, reuse=False, prefill=prefill),
        Variant("control", turns, reuse=False, prefill=prefill),
    ]


async def _run(
    turns: FakeTurns, variants: list[Variant], plan: SchedulePlan, fleet: _Fleet | None = None
) -> Run:
    return await run_schedule(
        variants,
        plan,
        TokenStreams(1, 4000),
        name="run",
        source=random.Random(1),
        clock=turns.clock,
        sleep=turns.clock.sleep,
        fleet=fleet,
    )


@dataclass
class _Fleet:
    """Decode workers that retain one block more at each look."""

    looks: int = 0
    away: bool = False

    async def blocks(self) -> KvBlocks:
        return KvBlocks(16, 1000, 100)

    async def retained_blocks(self) -> int:
        self.looks += 1
        if self.away:
            raise UnavailableError("kvmeta is away")
        return self.looks


def test_conversations_come_at_random_with_the_rate_asked_for() -> None:
    scripts = [_script(str(number)) for number in range(2000)]
    starts = Arrivals(rate=4.0).starts(scripts, random.Random(1))
    assert starts is not None
    gaps = [after - before for before, after in pairwise(starts)]
    assert mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert sum(gap < 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.04)


def test_recorded_conversations_come_as_they_did() -> None:
    scripts = [_script("a", start=10.0), _script("b", start=14.0)]
    assert Arrivals(time_scale=2.0).starts(scripts, random.Random(1)) == [0.0, 2.0]
    assert Arrivals(at_once=3).starts(scripts, random.Random(1)) is None


def test_a_trace_without_times_needs_a_rate_or_a_number() -> None:
    with pytest.raises(ValueError, match="no times"):
        Arrivals().starts([_script("a", start=1.0), _script("b")], random.Random(1))


@pytest.mark.parametrize(
    ("rate", "at_once", "time_scale", "said"),
    [
        (1.0, 1, 1.0, "not both"),
        (-1.0, None, 1.0, "a rate"),
        (None, 0, 1.0, "at least one"),
        (None, None, 0.0, "time scale"),
    ],
)
def test_arrivals_that_mean_nothing_are_refused(
    rate: float | None, at_once: int | None, time_scale: float, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Arrivals(rate, at_once, time_scale)


def test_a_turn_is_due_when_it_was_recorded_but_not_before_the_answer() -> None:
    script = _recorded("a", 5.0, 9.0)
    arrivals = Arrivals(time_scale=2.0)
    assert arrivals.due(script, script.turns[1], started=100.0, ended=101.0) == 102.0
    assert arrivals.due(script, script.turns[1], started=100.0, ended=107.0) == 107.0
    assert Arrivals(at_once=1).due(script, script.turns[1], started=100.0, ended=101.0) == 101.0


async def test_every_way_holds_all_conversations() -> None:
    turns = FakeTurns()
    plan = SchedulePlan("w", [_script("a"), _script("b", turns=3)], Arrivals(rate=1), 2, warm_ups=1)
    run = await _run(turns, _variants(turns), plan)
    assert len(run.samples) == 5 * 2 * 3
    assert len(run.rounds) == 2 * 3
    assert {found.turn for found in run.rounds} == {0}
    assert len(turns.requests) == 5 * 2 * 3 + 2 * 3
    assert {r.reuse for r in turns.requests if "-on-" in r.conversation} == {True}
    assert {r.reuse for r in turns.requests if "-on-" not in r.conversation} == {False}
    assert set(turns.ended) == {request.conversation for request in turns.requests}


async def test_a_conversation_goes_on_from_its_own_answers_after_its_pause() -> None:
    turns = FakeTurns()
    plan = SchedulePlan("w", [_script("a", pause=3.0)], Arrivals(at_once=1), warm_ups=0)
    run = await _run(turns, _variants(turns)[:1], plan)
    first, second = turns.requests
    answer = run.samples[0].result
    assert answer is not None
    assert second.prompt[:24] == (*first.prompt, *answer.token_ids)
    assert len(second.prompt) == 44
    assert (first.last, second.last) == (False, True)
    assert 3.0 in turns.clock.slept


async def test_conversations_of_one_holding_share_a_salt_and_ways_do_not() -> None:
    turns = FakeTurns()
    plan = SchedulePlan("w", [_script("a"), _script("b")], Arrivals(rate=1), 2, warm_ups=0)
    await _run(turns, _variants(turns), plan)
    salts = {request.conversation: request.cache_salt for request in turns.requests}
    assert len(salts) == 2 * 2 * 3
    assert len(set(salts.values())) == 2 * 3


async def test_answers_are_compared_while_prompts_are_equal() -> None:
    turns = FakeTurns(wrong_when_reusing=True)
    plan = SchedulePlan("w", [_script("a", turns=3)], Arrivals(rate=1), warm_ups=0)
    run = await _run(turns, _variants(turns), plan)
    checks = {check.variant: check for check in check_outputs(run)}
    # The first answers differ already, so no later prompt is the same.
    assert (checks["on"].compared, checks["on"].equal) == (0, 0)
    assert (checks["control"].compared, checks["control"].equal) == (2, 2)


async def test_a_failed_turn_ends_its_conversation_alone() -> None:
    turns = FakeTurns(failing="-off-0")
    plan = SchedulePlan("w", [_script("a"), _script("b")], Arrivals(rate=1), warm_ups=0)
    run = await _run(turns, _variants(turns), plan)
    failed = [sample for sample in run.samples if sample.error is not None]
    assert [(s.variant, s.conversation, s.turn) for s in failed] == [("off", 0, 1)]
    assert len(run.samples) == 11


async def test_what_is_retained_is_looked_at_and_a_silent_ledger_does_no_harm() -> None:
    turns, fleet = FakeTurns(), _Fleet()
    plan = SchedulePlan("w", [_script("a")], Arrivals(rate=1), warm_ups=0)
    run = await _run(turns, _variants(turns)[:1], plan, fleet)
    assert run.rounds[0].retained_blocks == 2
    run = await _run(turns, _variants(turns)[:1], plan, _Fleet(away=True))
    assert run.rounds[0].retained_blocks is None


async def test_prefill_is_made_cold_once_for_each_way() -> None:
    turns, prefill = FakeTurns(), FakePrefill()
    plan = SchedulePlan("w", [_script("a")], Arrivals(rate=1), warm_ups=0, cold=True)
    run = await _run(turns, _variants(turns, prefill), plan)
    assert prefill.resets == 3
    assert {found.transfers.count for found in run.rounds if found.transfers} == {1}


class _Gate(FakeTurns):
    """Turns that end only when all that shall run at once do."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self._barrier = asyncio.Barrier(together)

    async def run(self, request: TurnRequest) -> TurnResult:
        await self._barrier.wait()
        return await super().run(request)


async def test_an_open_loop_does_not_wait_for_earlier_conversations() -> None:
    turns = _Gate(3)
    scripts = [_script(str(n), start=float(n), turns=1) for n in range(3)]
    run = await _run(turns, _variants(turns)[:1], SchedulePlan("w", scripts, Arrivals(), 1, 0))
    assert len(run.samples) == 3


async def test_a_closed_loop_holds_so_many_at_once() -> None:
    turns = _Gate(2)
    scripts = [_script(str(n), turns=1) for n in range(6)]
    plan = SchedulePlan("w", scripts, Arrivals(at_once=2), warm_ups=0)
    run = await _run(turns, _variants(turns)[:1], plan)
    assert sorted(sample.conversation for sample in run.samples) == list(range(6))


async def test_progress_counts_every_turn() -> None:
    turns, told = FakeTurns(), list[Advance]()
    plan = SchedulePlan("w", [_script("a"), _script("b")], Arrivals(rate=1), 2, warm_ups=1)
    await run_schedule(
        _variants(turns),
        plan,
        TokenStreams(1, 4000),
        name="run",
        source=random.Random(1),
        clock=turns.clock,
        sleep=turns.clock.sleep,
        on_progress=told.append,
    )
    assert [advance.done for advance in told] == list(range(1, 31))
    assert {advance.total for advance in told} == {30}


def test_synthetic_conversations_have_the_sizes_asked_for() -> None:
    scripts = synthetic(
        random.Random(1),
        40,
        context_tokens=[100, 300],
        answer_tokens=[8],
        message_tokens=5,
        turns=3,
        pause_seconds=2.0,
    )
    assert {script.turns[0].message_tokens for script in scripts} == {100, 300}
    assert {script.largest_prompt for script in scripts} == {126, 326}
    assert {turn.pause_seconds for script in scripts for turn in script.turns} == {2.0}


async def test_how_late_a_turn_began_is_told() -> None:
    turns = FakeTurns()

    async def oversleep(seconds: float) -> None:
        await turns.clock.sleep(seconds + 2.0)

    plan = SchedulePlan("w", [_script("a", pause=3.0)], Arrivals(at_once=1), warm_ups=0)
    run = await run_schedule(
        _variants(turns)[:1],
        plan,
        TokenStreams(1, 4000),
        name="run",
        source=random.Random(1),
        clock=turns.clock,
        sleep=oversleep,
    )
    assert [sample.late_seconds for sample in run.samples] == [0.0, 2.0]
