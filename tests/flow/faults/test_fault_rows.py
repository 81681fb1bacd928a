"""Faults of docs/faults.md that are no row of the fault matrix."""

from __future__ import annotations

import asyncio

import pytest

from tests.flow.faults.driving import HOLD_SECONDS
from tests.flow.faults.rest import assert_at_rest, assert_released, eventually
from tests.flow.faults.turns import RIGHT, Turn, on_path, right_answer, right_turn
from tests.flow.faults.world import Setup, Worker
from tests.flow.faults.worlds import Worlds
from tests.flow.sim.engines import prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEFT_SECONDS = 4.9
"""Of a lease, when a read is declined: the margin is 5 s. The rest is for a busy machine."""


async def _held(worker: Worker, kind: str, *, seconds: float) -> int:
    """Let a worker's next request meet a fault; returns how often one has before."""
    before = (await worker.state())["faults_applied"].get(kind, 0)
    body = {"kind": kind, "seconds": seconds, "count": 1}
    assert (await worker.engine.post("/sim/faults", body)).status == 200
    return int(before)


@pytest.mark.parametrize(
    ("policy", "miss"), [("recompute", "ENGINE_EXPIRED"), ("fail", "PULL_FAILED")]
)
async def test_A16_a_pull_that_prefill_declines_leaves_the_answer_right(
    worlds: Worlds, policy: str, miss: str
) -> None:
    world, conversation = await worlds.of(Setup(policy=policy)), f"a16-{worlds.seed()}"
    first = await right_turn(world, conversation, prompt(300, worlds.seed()))
    prefill, decode = on_path(world, first)
    history = [*first.tokens, *first.answer, 7]
    before = await _held(prefill, "hang", seconds=HOLD_SECONDS)
    async with asyncio.TaskGroup() as tasks:
        turn = Turn(world, conversation, history, tasks)
        # Its handle is taken, so its pin is not renewed any more.
        await prefill.until(lambda state: state["faults_applied"].get("hang", 0) > before)
        (pin,) = (await decode.state())["pins"]
        await world.clock.advance(pin["expires_in_seconds"] - LEFT_SECONDS)
        await turn.end()
    assert (turn.outcome, turn.reuse) == (RIGHT, miss)
    assert turn.answer == await right_answer(world, history)
    await assert_at_rest(world)
    await assert_released(world, conversation)


async def test_B4_blocks_that_wait_for_a_peer_which_has_died_come_back(worlds: Worlds) -> None:
    world, seed = await worlds.of(Setup()), worlds.seed()
    conversation = f"b4-{seed}"
    first = await right_turn(world, conversation, prompt(300, seed))
    prefill, decode = on_path(world, first)
    for number in range(5):
        await _held(decode, "slow_transfer", seconds=HOLD_SECONDS)
        async with asyncio.TaskGroup() as tasks:
            turn = Turn(world, conversation, prompt(300, seed + number), tasks)
            await decode.until(lambda state: state["loading"])
            life = await prefill.state()
            prefill.engine.host.restart(0.0)
            await prefill.engine.next_life(life)
            turn.leave()
            await turn.end()
        await world.clock.advance(HOLD_SECONDS)
        await eventually(lambda: _unpinned(decode), 0)
        await world.mend()
    await right_turn(world, conversation, prompt(300, seed))
    await assert_at_rest(world)
    await assert_released(world, conversation)


async def _unpinned(worker: Worker) -> int:
    """Blocks in use for no retained turn."""
    blocks = (await worker.state())["blocks"]
    return int(blocks["used"] - blocks["pinned"])


async def test_no_service_waits_for_calls_that_the_router_has_open_there(worlds: Worlds) -> None:
    """See docs/adr/0065: a server that stops waits for its calls, here up to 10 s."""
    world, seed = await worlds.of(Setup()), worlds.seed()
    conversation = f"ahead-{seed}"
    first = await right_turn(world, conversation, prompt(300, seed))
    prefill, decode = on_path(world, first)
    await right_turn(world, conversation, [*first.tokens, *first.answer, 7])
    await asyncio.sleep(0.2)  # calls are opened 0.05 s after a request
    for leaving in (prefill.sidecar, decode.sidecar):
        async with asyncio.timeout(6):
            await leaving.end()
    await world.mend()
    await right_turn(world, conversation, prompt(300, seed + 1))
    await assert_at_rest(world)
    await assert_released(world, conversation)
