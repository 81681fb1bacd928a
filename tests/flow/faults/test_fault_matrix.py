"""Every fault at every step of a turn, by the table in docs/fault-matrix.md.

The client gets a right answer or a named error and never a wrong token; its next
turns are right; nothing stays in flight, and no block or pin without an owner.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.flow.faults.cases import Case, NoCase, Step
from tests.flow.faults.driving import Scene, counters, run
from tests.flow.faults.matrix import CASES, ENTRIES
from tests.flow.faults.rest import assert_at_rest, assert_released, eventually
from tests.flow.faults.turns import PULLED, RIGHT, Turn, on_path, right_answer, right_turn
from tests.flow.faults.world import World
from tests.flow.faults.worlds import Worlds
from tests.flow.sim.engines import prompt

_TOGETHER = pytest.mark.asyncio(loop_scope="module")


@_TOGETHER
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
async def test_a_fault_at_a_step_of_a_turn(worlds: Worlds, case: Case) -> None:
    shared = await worlds.of(case.setup)
    try:
        async with asyncio.timeout(110):
            await _check(shared, case, worlds.seed())
    except BaseException:
        await worlds.give_up(case.setup)
        raise


def test_the_table_has_every_fault_at_every_step_or_says_why_not() -> None:
    steps: dict[str, set[Step]] = {}
    for entry in ENTRIES:
        steps.setdefault(entry.fault, set()).add(entry.step)
    assert len(steps) == 13
    assert all(met == set(Step) for met in steps.values())
    assert not {(e.fault, e.step) for e in ENTRIES if isinstance(e, NoCase)} & {
        (case.fault, case.step) for case in CASES
    }
    assert len({case.name for case in CASES}) == len(CASES) > 100


async def _check(world: World, case: Case, seed: int) -> None:
    conversation = f"c{seed}"
    first = await right_turn(world, conversation, prompt(300, seed))
    history = [*first.tokens, *first.answer, 7]
    scene = Scene(world, case, *on_path(world, first))
    before = counters(world)
    struck = await run(scene, lambda tasks: Turn(world, conversation, history, tasks))
    right = await right_answer(world, history)
    await eventually(lambda: _seen(world, struck, before), _expected(case), seconds=40.0)
    assert struck.answer == right[: len(struck.answer)]
    assert len(struck.answer) == len(right) or struck.outcome != RIGHT

    await world.mend()
    if struck.outcome == RIGHT:
        history = [*history, *struck.answer, 8]
    for worker in world.of_role("prefill"):
        await worker.engine.post("/reset_prefix_cache")
    next_turn = await right_turn(world, conversation, history)
    assert next_turn.reuse == case.then
    if next_turn.reuse != PULLED:
        last = await right_turn(world, conversation, [*history, *next_turn.answer, 9])
        assert last.reuse == PULLED
    await assert_at_rest(world)
    await assert_released(world, conversation)


async def _seen(world: World, turn: Turn, before: Counter[str]) -> dict[str, object]:
    return {
        "answer": turn.outcome,
        "reuse": turn.reuse if turn.receipt else "",
        "kept": turn.receipt.retain_outcome if turn.receipt else "",
        "counted": dict(counters(world) - before),
    }


def _expected(case: Case) -> dict[str, object]:
    return {
        "answer": case.answer,
        "reuse": case.reuse,
        "kept": case.kept,
        "counted": case.counted(),
    }
