"""Of bodies that went ahead nothing is kept, and few are under way at a time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvloop.kvmeta.v1 import registry_pb2
from kvloop.router.v1 import router_pb2
from services.router.prefill_leg import PrefillLeg
from services.router.preparation import Preparation
from services.router.turn_state import Turn
from tests.flow.router.fakes import eventually, waits
from tests.flow.router.stack import running
from tests.flow.router.test_router_bodies_ahead import (
    ahead,
    connected,
    ledger_that_waits_for,
    until_prepared,
)

_LONG: dict[str, Any] = {"messages": [router_pb2.ChatMessage(role="user", content="hello " * 5000)]}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What refers to itself in a circle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(*kinds: type) -> list[str]:
    return [type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds)]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_body_that_got_lost_is_given_up_at_once(leg):
    async with connected() as stack:
        stack.give_handle("c", "d0")
        worker, end = stack["p0" if leg == "prefill" else "d0"], asyncio.Event()
        stack["d0"].mid_answer_steps.append(waits(end))

        async def lose() -> None:
            await eventually(lambda: worker.preparations)
            worker.lose_bodies()
            stack.ledger_servicer.gate.set()

        if leg == "prefill":
            stack.ledger_servicer.gate.clear()
        else:
            stack["p0"].prefill_steps.append(lose)
        async with asyncio.TaskGroup() as tasks:
            if leg == "prefill":
                tasks.create_task(lose())
            turn = tasks.create_task(stack.chat("c", **_LONG))
            await eventually(lambda: worker.cancelled == ["prepare"])
            assert not turn.done()
            end.set()


async def test_a_body_for_prefill_is_given_up_where_prefill_is_left_out():
    async with connected() as stack:
        end = asyncio.Event()
        stack["d0"].mid_answer_steps.append(waits(end))
        stack.ledger_servicer.gate.clear()
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(stack.chat("c", **_LONG))
            await eventually(lambda: stack["p0"].preparations)
            draining = registry_pb2.Worker()
            draining.CopyFrom(stack["p0"].worker)
            draining.state = registry_pb2.Worker.STATE_DRAINING
            stack.registry.add(draining)
            await eventually(lambda: not stack.router.pool.models()[0].prefill)
            stack.ledger_servicer.gate.set()
            await eventually(lambda: stack["p0"].cancelled == ["prepare"])
            assert not turn.done()
            assert not stack["p0"].prefills
            end.set()


@pytest.mark.usefixtures("no_collector")
async def test_a_turn_that_has_ended_is_freed_at_once():
    async with connected() as stack:
        for number in range(5):
            stack["p0"].prefill_steps.append(until_prepared(stack))
            async with ledger_that_waits_for(stack):
                await stack.chat(f"c{number}", **_LONG)
        await eventually(lambda: not alive(Turn, Preparation))
        assert ahead(stack, "prefill")["used"] == 5


async def test_no_copy_of_a_body_is_kept_while_the_answer_lasts():
    async with connected() as stack:
        end = asyncio.Event()
        stack["d0"].mid_answer_steps.append(waits(end))
        stack["p0"].prefill_steps.append(until_prepared(stack))

        async def chat() -> None:
            async with ledger_that_waits_for(stack):
                await stack.chat("c", **_LONG)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(chat())
            await eventually(lambda: stack["d0"].decodes)
            await eventually(lambda: not _preparing_calls())
            end.set()


def _preparing_calls() -> list[str]:
    calls = [each for each in gc.get_objects() if isinstance(each, grpc.aio.UnaryUnaryCall)]
    requests = [type(getattr(call, "_request", None)).__name__ for call in calls]
    return [name for name in requests if name.startswith("Prepare")]


async def test_a_handle_is_not_lost_when_its_turn_breaks_at_the_body(monkeypatch):
    def broken(self: PrefillLeg, turn: Turn) -> None:
        raise RuntimeError("a defect")

    async with connected() as stack:
        handle_id = stack.give_handle("c", "d0")
        monkeypatch.setattr(PrefillLeg, "prepare", broken)
        with pytest.raises(Exception, match="internal"):
            await stack.chat("c", **_LONG)
        monkeypatch.undo()
        await eventually(lambda: handle_id in stack.ledger.returned)


async def test_two_bodies_are_under_way_at_most():
    async with connected() as stack:
        end = asyncio.Event()
        stack["p0"].prefill_steps += [waits(end)] * 5
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(stack.chat("", **_LONG))
            await eventually(lambda: len(stack["p0"].prefills) == 5)
            await eventually(lambda: len(stack["d0"].preparations) == 2)
            end.set()
        assert ahead(stack) == {"used": 2}
        stack["p0"].prefill_steps.append(until_prepared(stack))
        stack["d0"].preparations.clear()
        await stack.chat("", **_LONG)  # there is room again
        assert ahead(stack) == {"used": 3}


async def test_among_equals_the_prefill_worker_that_has_the_body_is_taken():
    draws = iter([0.0, 0.99] * 50)
    async with running(prefill=("p0", "p1", "p2"), rng=lambda: next(draws)) as stack:
        for _ in range(20):
            await stack.chat("")
        for number in range(10):
            stack.give_handle(f"c{number}", "d0")
            await stack.chat(f"c{number}", **_LONG)
        outcomes = ahead(stack, "prefill")
        assert outcomes["used"] >= 8
        assert "elsewhere" not in outcomes
