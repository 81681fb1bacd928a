"""Turns that leave their conversation's decode worker are counted, by why they did."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvloop.errors import InternalError, UnavailableError
from kvloop.kvmeta.v1 import registry_pb2
from services.router.candidates import Candidate
from services.router.moves import Move, why_moved
from tests.flow.router.fakes import eventually, make_worker, raises, waits
from tests.flow.router.stack import DECODE, Stack, running

UNREACHABLE = UnavailableError("no engine", reason="ENGINE_UNREACHABLE")
DRAINING = UnavailableError("draining", reason="DRAINING")


def moved(stack: Stack) -> Counter[Move]:
    return +Counter(
        {move: int(stack.count("turns_moved_total", reason=move.value)) for move in Move}
    )


@pytest.mark.parametrize(
    ("state", "reachable", "failed", "why"),
    [
        ("STATE_ACTIVE", True, False, Move.BUSY),
        ("STATE_ACTIVE", False, False, Move.AVOIDED),
        ("STATE_ACTIVE", False, True, Move.FAILED),
        ("STATE_ACTIVE", True, True, Move.FAILED),
        ("STATE_DRAINING", True, True, Move.DRAINING),
        ("STATE_DRAINING", False, False, Move.DRAINING),
    ],
)
def test_the_reason_is_what_the_router_knows_of_the_worker(
    state: str, reachable: bool, failed: bool, why: Move
) -> None:
    worker = make_worker("d0", DECODE)
    worker.state = registry_pb2.Worker.State.Value(state)
    others = [Candidate(make_worker("d1", DECODE)), Candidate(worker, reachable=reachable)]

    assert why_moved("d0", others, failed=failed) is why
    assert why_moved("d2", others, failed=failed) is Move.GONE


async def test_turns_that_stay_or_have_no_worker_yet_are_not_counted() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        first = await stack.chat("c")
        second = await stack.chat("c")
        await stack.chat()

        assert first.receipt.decode_worker_id == second.receipt.decode_worker_id
        assert moved(stack) == Counter()


async def test_a_turn_leaves_a_busy_worker() -> None:
    now = 100.0
    async with running(decode=["d0", "d1"], clock=lambda: now) as stack:
        gate = asyncio.Event()
        stack["d0"].decode_steps = [waits(gate)]
        stack.give_handle("other", "d0")
        stack.give_handle("c", "d0")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stack.chat("other"))
            await eventually(lambda: stack["d0"].decodes)
            now += 30
            assert (await stack.chat("c")).receipt.decode_worker_id == "d1"
            gate.set()

        assert moved(stack) == Counter({Move.BUSY: 1})


async def test_a_turn_leaves_a_worker_that_fails_it_and_the_next_ones_avoid_it() -> None:
    async with running(decode=["d0", "d1"], settings={"worker_cooldown_seconds": 3600}) as stack:
        stack.give_handle("c", "d0")
        stack["d0"].decode_steps = [raises(UNREACHABLE)]
        assert (await stack.chat("c")).receipt.decode_worker_id == "d1"
        assert moved(stack) == Counter({Move.FAILED: 1})

        stack.give_handle("other", "d0")
        await stack.chat("other")
        await stack.chat("c")

        assert moved(stack) == Counter({Move.FAILED: 1, Move.AVOIDED: 1})


async def test_a_turn_leaves_a_worker_that_is_cut_off_during_its_prefill() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        stack.give_handle("c", "d0")

        async def another_turn_fails() -> None:
            with pytest.raises(UnavailableError), stack.router.pool.use("d0"):
                raise UNREACHABLE

        stack["p0"].prefill_steps = [another_turn_fails]
        assert (await stack.chat("c")).receipt.decode_worker_id == "d1"

        assert moved(stack) == Counter({Move.AVOIDED: 1})


async def test_a_turn_leaves_a_worker_that_drains() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        stack.give_handle("c", "d0")
        stack["d0"].decode_steps = [raises(DRAINING)]
        assert (await stack.chat("c")).receipt.decode_worker_id == "d1"

        assert moved(stack) == Counter({Move.DRAINING: 1})


async def test_a_turn_leaves_a_worker_that_is_gone() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        stack.give_handle("c", "d0")
        stack.registry.remove("d0")
        await eventually(lambda: stack.router.pool.find("d0") is None)
        assert (await stack.chat("c")).receipt.decode_worker_id == "d1"

        assert moved(stack) == Counter({Move.GONE: 1})


async def test_a_turn_that_its_worker_answers_at_the_second_attempt_has_not_moved() -> None:
    async with running(decode=["d0"]) as stack:
        stack.give_handle("c", "d0")
        stack["d0"].decode_steps = [raises(InternalError("500", reason="ENGINE_FAILED"))]
        await stack.chat("c")

        assert stack.count("fallbacks_total", cause="decode_repeated") == 1
        assert moved(stack) == Counter()
