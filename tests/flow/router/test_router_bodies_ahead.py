"""Bodies go ahead: decode's while prefill works, prefill's while the ledger is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvloop.errors import InternalError, UnavailableError
from kvloop.router.v1 import router_pb2
from tests.flow.patience import HELD_UP_SECONDS
from tests.flow.router.fakes import eventually, raises, waits
from tests.flow.router.stack import Answer, Stack, running

_LONG: dict[str, Any] = {"messages": [router_pb2.ChatMessage(role="user", content="hello " * 5000)]}


def until_prepared(stack: Stack, worker_id: str = "d0"):
    """A step of prefill that ends when the body is at decode."""

    async def step() -> None:
        await eventually(lambda: stack[worker_id].preparations)

    return step


def ahead(stack: Stack, leg: str = "decode") -> dict[str, float]:
    """What became of bodies, those that were counted."""
    outcomes = ("used", "too_late", "declined", "lost", "elsewhere")
    counted = {name: stack.count("bodies_ahead_total", leg=leg, outcome=name) for name in outcomes}
    return {name: value for name, value in counted.items() if value}


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[Stack]:
    """A router with open channels: bodies go ahead on none that has yet to be made."""
    async with running(**options) as stack:
        await stack.chat("")
        for worker in stack.workers.values():
            worker.prefills.clear()
            worker.decodes.clear()
        yield stack


@asynccontextmanager
async def ledger_that_waits_for(stack: Stack, worker_id: str = "p0") -> AsyncIterator[None]:
    """A ledger that gives no handle out before the body is at that worker."""
    stack.ledger_servicer.gate.clear()

    async def open_gate() -> None:
        await eventually(lambda: stack[worker_id].preparations)
        stack.ledger_servicer.gate.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(open_gate())
        yield


def assert_answered(stack: Stack, answer: Answer, worker_id: str = "d0") -> None:
    """The worker decoded the one turn, whole, with what prefill handed over."""
    (leg,) = stack[worker_id].decodes
    assert answer.chunks == stack[worker_id].chunks
    assert len(leg.body_json) > 16 * 1024
    assert b'"turn"' in leg.transfer_params_json
    assert leg.accept_batches


async def test_a_long_body_goes_ahead_and_the_leg_comes_without_it():
    async with connected() as stack:
        stack["p0"].prefill_steps.append(until_prepared(stack))
        answer = await stack.chat("c", **_LONG)
        assert_answered(stack, answer)
        assert stack["d0"].without_body == 1
        (leg,) = stack["d0"].preparations
        assert not leg.transfer_params_json
        assert answer.receipt.retained_tokens == 102
        assert ahead(stack) == {"used": 1}


async def test_an_answer_in_one_piece_is_asked_for_ahead_too():
    async with connected() as stack:
        stack["p0"].prefill_steps.append(until_prepared(stack))
        stack["d0"].batches = True
        await stack.chat("c", **_LONG)
        assert stack["d0"].without_body == 1


async def test_a_short_body_does_not_go_ahead():
    async with connected() as stack:
        await stack.chat("c")
        assert not stack["d0"].preparations
        assert not ahead(stack)


async def test_none_goes_ahead_where_that_is_switched_off():
    async with connected(settings={"ahead_bytes": 0}) as stack:
        answer = await stack.chat("c", **_LONG)
        assert_answered(stack, answer)
        assert not stack["d0"].preparations


async def test_a_sidecar_that_takes_no_bodies_is_sent_none():
    """As those of older versions do, which register nothing of it."""
    async with connected(traits={"p0": {"prepared_legs": 0}, "d0": {"prepared_legs": 0}}) as stack:
        answer = await stack.chat("c", **_LONG)
        assert_answered(stack, answer)
        assert not stack["p0"].preparations
        assert not stack["d0"].preparations
        assert not ahead(stack)


async def test_a_body_that_is_refused_comes_with_its_leg():
    async with connected() as stack:
        stack["d0"].prepares = False
        stack["p0"].prefill_steps.append(until_prepared(stack))
        answer = await stack.chat("c", **_LONG)
        assert_answered(stack, answer)
        assert sum(ahead(stack).values()) >= 1


async def test_a_body_that_got_lost_is_sent_again():
    async with connected() as stack:

        async def lose() -> None:
            await eventually(lambda: stack["d0"].preparations)
            stack["d0"].lose_bodies()

        stack["p0"].prefill_steps.append(lose)
        answer = await stack.chat("c", **_LONG)
        assert_answered(stack, answer)
        assert stack["d0"].without_body == 1
        assert ahead(stack) == {"used": 1, "lost": 1}
        assert stack.count("fallbacks_total", cause="decode_repeated") == 0
        await eventually(lambda: stack["d0"].cancelled == ["prepare"])


async def test_prefill_that_is_done_at_once_waits_for_no_body():
    async with connected() as stack:
        for _ in range(20):  # a prefill leg of more than 2 ms is possible, not usual
            await stack.chat("", **_LONG)
        assert len(stack["d0"].decodes) == 20
        outcomes = ahead(stack)
        outcomes.pop("lost", None)  # counted beside a body that was used, on a busy machine
        assert sum(outcomes.values()) == 20


async def test_a_leg_that_moves_leaves_its_body_behind():
    async with connected(decode=("d0", "d1")) as stack:

        async def move() -> None:
            await eventually(lambda: stack["d0"].preparations)
            stack.registry.remove("d0")
            await eventually(lambda: stack.router.pool.find("d0") is None)

        stack["p0"].prefill_steps.append(move)
        answer = await stack.chat("c", **_LONG)
        assert_answered(stack, answer, "d1")
        assert ahead(stack) == {"elsewhere": 1}
        await eventually(lambda: "prepare" in stack["d0"].cancelled)


async def test_a_repeated_leg_brings_its_body():
    async with connected() as stack:
        stack["p0"].prefill_steps.append(until_prepared(stack))
        stack["d0"].decode_steps.append(raises(InternalError("no", reason="ENGINE_FAILED")))
        answer = await stack.chat("c", **_LONG)
        assert answer.chunks == stack["d0"].chunks
        first, second = stack["d0"].decodes
        assert first.body_json == second.body_json
        assert stack["d0"].without_body == 1
        assert ahead(stack) == {"used": 1}


async def test_without_a_hand_over_the_body_serves_all_the_same():
    async with connected() as stack:

        async def fail() -> None:
            await eventually(lambda: stack["d0"].preparations)
            raise UnavailableError("gone", reason="ENGINE_UNREACHABLE")

        stack["p0"].prefill_steps.append(fail)
        answer = await stack.chat("c", **_LONG)
        assert answer.chunks == stack["d0"].chunks
        (leg,) = stack["d0"].decodes
        assert not leg.transfer_params_json
        assert ahead(stack) == {"used": 1}


@pytest.mark.parametrize("way", ["hangs up", "deadline"])
async def test_a_turn_that_ends_during_prefill_takes_its_body_back(way):
    async with connected(clock=time.monotonic) as stack:
        stack["p0"].prefill_steps.append(waits(asyncio.Event()))
        limit = HELD_UP_SECONDS if way == "deadline" else None
        turn = asyncio.create_task(stack.chat("c", timeout_seconds=limit, **_LONG))
        await eventually(lambda: stack["d0"].preparations)
        if way == "hangs up":
            turn.cancel()
        await asyncio.wait({turn})
        await eventually(lambda: stack["d0"].cancelled == ["prepare"])
        assert not stack["d0"].decodes


async def test_prefills_body_goes_ahead_while_the_ledger_is_asked():
    async with connected() as stack:
        stack.give_handle("c", "d0")
        async with ledger_that_waits_for(stack):
            answer = await stack.chat("c", **_LONG)
        assert stack["p0"].without_body == 1
        (prepared,), (leg,) = stack["p0"].preparations, stack["p0"].prefills
        assert not prepared.transfer_params_json
        assert leg.transfer_params_json == b'{"blocks":[[1,2]]}'
        assert len(leg.body_json) > 16 * 1024
        assert leg.engine == stack["d0"].worker.engine
        assert answer.receipt.prefill.pulled_tokens == 80
        assert ahead(stack, "prefill") == {"used": 1}


async def test_a_body_that_prefill_lost_is_sent_again_with_its_handle():
    async with connected() as stack:
        stack.give_handle("c", "d0")
        stack.ledger_servicer.gate.clear()

        async def lose() -> None:
            await eventually(lambda: stack["p0"].preparations)
            stack["p0"].lose_bodies()
            stack.ledger_servicer.gate.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lose())
            answer = await stack.chat("c", **_LONG)
        (leg,) = stack["p0"].prefills
        assert leg.transfer_params_json
        assert len(leg.body_json) > 16 * 1024
        assert answer.receipt.prefill.pulled_tokens == 80
        assert ahead(stack, "prefill") == {"used": 1, "lost": 1}
        assert stack.count("fallbacks_total", cause="prefill_repeated") == 0


async def test_a_handle_that_calls_for_another_prefill_worker_leaves_the_body_behind():
    """p0 is chosen while nothing is known; only p1 can pull from d0."""
    traits = {"p0": {"bidirectional_kv_xfer": False}}
    async with connected(prefill=("p0", "p1"), traits=traits) as stack:
        stack.give_handle("c", "d0")
        async with ledger_that_waits_for(stack):
            answer = await stack.chat("c", **_LONG)
        assert not stack["p0"].prefills
        assert len(stack["p1"].prefills) == 1
        assert answer.receipt.prefill.pulled_tokens == 80
        assert ahead(stack, "prefill") == {"elsewhere": 1}
        await eventually(lambda: stack["p0"].cancelled == ["prepare"])


async def test_a_turn_that_hangs_up_on_the_ledger_takes_its_body_back():
    async with connected() as stack:
        stack.ledger_servicer.gate.clear()
        turn = asyncio.create_task(stack.chat("c", **_LONG))
        await eventually(lambda: stack["p0"].preparations)
        turn.cancel()
        await asyncio.wait({turn})
        await eventually(lambda: stack["p0"].cancelled == ["prepare"])
        stack.ledger_servicer.gate.set()
        assert not stack["p0"].prefills


async def test_without_a_conversation_only_decodes_body_goes_ahead():
    async with connected() as stack:
        stack["p0"].prefill_steps.append(until_prepared(stack))
        await stack.chat("", **_LONG)
        assert not stack["p0"].preparations
        assert ahead(stack) == {"used": 1}
