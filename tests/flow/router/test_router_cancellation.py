"""A client that goes away stops whichever leg runs, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvloop.errors import DeadlineError
from kvloop.router.v1 import router_pb2
from tests.flow.patience import HELD_UP_SECONDS
from tests.flow.router.fakes import eventually, waits
from tests.flow.router.stack import Stack, chat_request, running


def in_flight(stack: Stack) -> int:
    found = [stack.router.pool.find(worker_id) for worker_id in stack.workers]
    return sum(candidate.in_flight for candidate in found if candidate)


async def test_cancel_in_the_prefill_leg_stops_it_and_starts_no_other() -> None:
    async with running(prefill=["p0", "p1"]) as stack:
        stack.give_handle("c", "d0")
        stack["p0"].prefill_steps = [waits(asyncio.Event())]
        call = stack.stub.Chat(chat_request("c"))
        await eventually(lambda: stack["p0"].prefills)
        call.cancel()
        await eventually(lambda: stack["p0"].cancelled == ["prefill"])
        await eventually(lambda: stack.count("turns_total", outcome="cancelled") == 1)
        assert stack["p1"].calls == 0
        assert stack["d0"].calls == 0
        assert stack.ledger.returned == []  # the engine may have used the handle
        assert in_flight(stack) == 0


async def test_cancel_before_the_first_chunk_stops_the_decode_leg() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        stack["d0"].decode_steps = [waits(asyncio.Event())]
        call = stack.stub.Chat(chat_request("c"))
        await eventually(lambda: stack["d0"].decodes)
        call.cancel()
        await eventually(lambda: stack["d0"].cancelled == ["decode"])
        await eventually(lambda: in_flight(stack) == 0)
        assert stack["d1"].calls == 0


async def test_cancel_mid_answer_stops_the_decode_leg_and_commits_nothing() -> None:
    async with running() as stack:
        stack["d0"].mid_answer_steps = [waits(asyncio.Event())]
        call = stack.stub.Chat(chat_request("c"))
        await anext(aiter(call))
        call.cancel()
        await eventually(lambda: stack["d0"].cancelled == ["decode"])
        await eventually(lambda: stack.count("turns_total", outcome="cancelled") == 1)
        assert stack.ledger.row("c").handle is None
        assert in_flight(stack) == 0


async def test_cancel_by_a_client_that_does_not_read_stops_the_decode_leg() -> None:
    async with running() as stack:
        stack["d0"].chunks = [b"x" * 65536] * 1000  # more than the buffers on the way hold
        call = stack.stub.Chat(chat_request("c"))
        await anext(aiter(call))
        call.cancel()
        await eventually(lambda: stack.count("turns_total", outcome="cancelled") == 1)
        await eventually(lambda: in_flight(stack) == 0)
        await eventually(lambda: stack["d0"].cancelled == ["decode"])


async def test_cancel_while_the_ledger_is_asked_gives_the_handle_back() -> None:
    async with running() as stack:
        handle_id = stack.give_handle("c", "d0")
        stack.ledger_servicer.gate.clear()
        call = stack.stub.Chat(chat_request("c"))
        await eventually(lambda: stack.ledger_servicer.waiting)
        call.cancel()
        await eventually(lambda: stack.count("turns_total", outcome="cancelled") == 1)
        stack.ledger_servicer.gate.set()
        await eventually(lambda: stack.ledger.returned == [handle_id])
        await eventually(lambda: stack.count("handle_returns_total", outcome="late") == 1)
        assert stack["p0"].calls == 0


async def test_each_leg_gets_the_clients_deadline_less_a_margin() -> None:
    async with running(settings={"deadline_margin_seconds": 5.0}) as stack:
        await stack.chat("c", timeout_seconds=60)
        for given in (*stack["p0"].prefill_timeouts, *stack["d0"].decode_timeouts):
            assert given is not None
            assert 30 < given <= 56  # gRPC rounds up on the wire


async def test_a_turn_without_a_deadline_gets_the_routers() -> None:
    async with running(settings={"max_turn_seconds": 100, "prefill_timeout_seconds": 50}) as stack:
        await stack.chat("c")
        [prefill], [decode] = stack["p0"].prefill_timeouts, stack["d0"].decode_timeouts
        assert prefill is not None
        assert decode is not None
        assert 45 < prefill <= 51  # gRPC rounds up on the wire
        assert 95 < decode <= 102


async def test_deadline_mid_answer_ends_it() -> None:
    async with running(clock=time.monotonic) as stack:
        stack["d0"].mid_answer_steps = [waits(asyncio.Event())]
        with pytest.raises(DeadlineError):
            await stack.chat("c", timeout_seconds=HELD_UP_SECONDS)
        await eventually(lambda: stack["d0"].cancelled == ["decode"])


async def test_stopping_the_router_stops_the_legs() -> None:
    async with running() as stack:
        stack["d0"].mid_answer_steps = [waits(asyncio.Event())]
        call = stack.stub.Chat(chat_request("c"))
        first = await anext(aiter(call))
        assert isinstance(first, router_pb2.ChatResponse)
    assert stack["d0"].cancelled == ["decode"]
