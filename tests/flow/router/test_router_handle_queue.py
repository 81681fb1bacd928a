"""What a prefill leg is expected to take: a handle that is gone shortens it no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvloop.errors import InternalError, UnavailableError
from tests.flow.router.fakes import eventually, raises, waits
from tests.flow.router.stack import Stack, running

PULLED, COMPUTED = 0.019, 0.09
"""Seconds that are assumed for pulling 900 tokens, and for computing them."""
NOT_SEEN = UnavailableError("no engine", reason="ENGINE_UNREACHABLE")
MAYBE_SEEN = InternalError("engine said 500", reason="ENGINE_FAILED", http_status=500)


def now() -> float:
    return 100.0


def give_handle(stack: Stack, params: bytes = b'{"blocks":[[1,2]]}') -> None:
    stack.give_handle("c", "d0", params)
    handle = stack.ledger.row("c").handle
    assert handle is not None
    handle.num_tokens = 900


@asynccontextmanager
async def a_turn_at(stack: Stack, worker_id: str) -> AsyncIterator[None]:
    """A turn of the conversation is at that prefill worker while the block runs."""
    gate = asyncio.Event()
    stack[worker_id].prefill_steps.append(waits(gate))
    before = len(stack[worker_id].prefills)
    async with asyncio.TaskGroup() as tasks:
        turn = tasks.create_task(stack.chat("c"))
        await eventually(lambda: len(stack[worker_id].prefills) > before)
        yield
        gate.set()
        await turn


def queue(stack: Stack, worker_id: str) -> float:
    found = stack.router.pool.find(worker_id)
    assert found is not None
    return found.load.wait(found.in_flight, now())


async def test_a_turn_with_a_handle_is_expected_to_pull() -> None:
    async with running(clock=now) as stack:
        give_handle(stack)
        async with a_turn_at(stack, "p0"):
            assert queue(stack, "p0") == pytest.approx(PULLED)


@pytest.mark.parametrize(("error", "seconds"), [(NOT_SEEN, PULLED), (MAYBE_SEEN, COMPUTED)])
async def test_a_second_attempt_pulls_only_with_a_handle_that_nobody_saw(error, seconds) -> None:
    async with running(prefill=["p0", "p1"], clock=now) as stack:
        give_handle(stack)
        stack["p0"].prefill_steps = [raises(error)]
        async with a_turn_at(stack, "p1"):
            assert queue(stack, "p1") == pytest.approx(seconds)


def has_restarted(stack: Stack) -> Callable[[], bool]:
    worker = stack["d0"].worker
    worker.engine.epoch = "2"
    stack.registry.add(worker)
    return lambda: stack.router.pool.find("d0").worker.engine.epoch == "2"  # type: ignore[union-attr]


def has_left(stack: Stack) -> Callable[[], bool]:
    stack.registry.remove("d0")
    return lambda: stack.router.pool.find("d0") is None


@pytest.mark.parametrize("holder", [has_restarted, has_left])
async def test_a_holder_that_is_gone_leaves_everything_to_compute(holder) -> None:
    async with running(decode=["d0", "d1"], clock=now) as stack:
        give_handle(stack)
        await eventually(holder(stack))
        async with a_turn_at(stack, "p0"):
            assert queue(stack, "p0") == pytest.approx(COMPUTED)


async def test_a_handle_that_leads_elsewhere_leaves_everything_to_compute() -> None:
    traits = {"d0": {"side_channel_host": "10.0.0.1", "side_channel_port": 5700}}
    async with running(traits=traits, clock=now) as stack:
        give_handle(stack, b'{"remote_host":"10.6.6.6","remote_port":5700}')
        async with a_turn_at(stack, "p0"):
            assert queue(stack, "p0") == pytest.approx(COMPUTED)


async def test_a_worker_that_cannot_pull_is_expected_to_compute() -> None:
    async with running(traits={"p0": {"contract_version": 2}}, clock=now) as stack:
        give_handle(stack)
        async with a_turn_at(stack, "p0"):
            assert queue(stack, "p0") == pytest.approx(COMPUTED)


async def test_matched_tokens_count_the_handle_that_was_lost() -> None:
    async with running(traits={"p0": {"contract_version": 2}}, clock=now) as stack:
        give_handle(stack)
        await stack.chat("c")
        assert stack.count("matched_tokens_total") == 900
