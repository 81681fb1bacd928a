"""A conversation leaves a decode worker that is busy, and its KV is used once more."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from services.router.policies import PolicyName
from tests.flow.router.fakes import eventually, waits
from tests.flow.router.stack import Stack, running


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def one_turn_waiting_at(stack: Stack, worker_id: str):
    """A turn of another conversation has no answer yet while the block runs."""
    gate = asyncio.Event()
    stack[worker_id].decode_steps.append(waits(gate))
    stack.give_handle("other", worker_id)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(stack.chat("other"))
        await eventually(lambda: stack[worker_id].decodes)
        yield
        gate.set()
        assert (await waiting).receipt.decode_worker_id == worker_id


@pytest.mark.parametrize("policy", list(PolicyName))
async def test_a_busy_holder_is_left_and_its_pin_pulled_once(policy: PolicyName) -> None:
    clock = Clock()
    settings = {"policy": policy.value}
    async with running(decode=["d0", "d1"], settings=settings, clock=clock) as stack:
        stack.give_handle("c", "d0", b'{"blocks":[[7]]}')
        async with one_turn_waiting_at(stack, "d0"):
            stack["p0"].prefills.clear()
            clock.now += 30
            moved = await stack.chat("c")
            assert moved.receipt.decode_worker_id == "d1"
            assert moved.receipt.handle_hit
            (pulled,) = stack["p0"].prefills
            assert pulled.transfer_params_json == b'{"blocks":[[7]]}'
            assert pulled.engine == stack["d0"].worker.engine
        # The old pin was used and is not in the ledger any more: d1's is.
        row = stack.ledger.row("c")
        assert row.handle is not None
        assert row.handle.worker_id == "d1"
        assert stack.ledger.returned == []
        following = await stack.chat("c")
        assert following.receipt.decode_worker_id == "d1"
        assert stack["p0"].params_seen.count(b'{"blocks":[[7]]}') == 1


@pytest.mark.parametrize("policy", list(PolicyName))
async def test_a_holder_with_time_keeps_the_conversation(policy: PolicyName) -> None:
    settings = {"policy": policy.value}
    async with running(decode=["d0", "d1"], settings=settings, clock=Clock()) as stack:
        stack.give_handle("c", "d0")
        async with one_turn_waiting_at(stack, "d0"):
            assert (await stack.chat("c")).receipt.decode_worker_id == "d0"
