"""A caller who goes away stops the engine's work, and nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvloop import rpc
from kvloop.errors import DeadlineError
from tests.flow.patience import HELD_UP_SECONDS
from tests.flow.worker.stack import (
    CHAT,
    FIRST,
    answer,
    collect,
    decode_request,
    next_chunk,
    prefill_request,
    sidecar,
)
from tests.unit.worker.fake_vllm import Answer, sse
from tests.unit.worker.fakes import until

SECONDS = 10.0  # for the engine to notice, on a machine that may be busy


async def _noticed(stack) -> None:
    async with asyncio.timeout(SECONDS):
        await stack.vllm.requests(CHAT)[0].disconnected.wait()
    await until(lambda: stack.worker.admission.in_flight == 0)


async def test_cancelling_prefill_closes_the_engines_connection(tmp_path: Path) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        stack.vllm.answers[CHAT] = Answer(hold=asyncio.Event())
        call = stack.stub.Prefill(prefill_request())
        await until(lambda: stack.vllm.requests(CHAT))
        call.cancel()
        await _noticed(stack)


async def test_cancelling_decode_before_its_first_byte(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        stack.vllm.answers[CHAT] = Answer(hold=asyncio.Event())
        call = stack.stub.Decode(decode_request())
        await until(lambda: stack.vllm.requests(CHAT))
        call.cancel()
        await _noticed(stack)


async def test_cancelling_decode_in_the_middle(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        stack.vllm.answers[CHAT] = answer(asyncio.Event())
        call = stack.stub.Decode(decode_request())
        await next_chunk(call)
        call.cancel()
        await _noticed(stack)
        await stack.connector.finish("turn-1", retained=False)
        assert stack.kvmeta.commits == []


async def test_cancelling_decode_while_its_caller_does_not_read(tmp_path: Path) -> None:
    """The sidecar is then waiting for room towards the caller, not for the engine."""
    async with sidecar(tmp_path) as stack:
        big = b'{"choices":[{"delta":{"content":"' + b"x" * 500_000 + b'"}}]}'
        stack.vllm.answers[CHAT] = Answer(steps=sse(*[big] * 200))
        call = stack.stub.Decode(decode_request())
        await next_chunk(call)
        call.cancel()
        await _noticed(stack)


async def test_a_deadline_that_passes_stops_the_engine_too(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        stack.vllm.answers[CHAT] = answer(asyncio.Event())
        call = stack.stub.Decode(decode_request(), timeout=HELD_UP_SECONDS)
        await next_chunk(call)
        with pytest.raises(DeadlineError), rpc.typed_errors():
            await next_chunk(call)
        await _noticed(stack)


async def test_a_turn_that_ended_just_before_it_was_cancelled_is_released(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        stack.vllm.answers[CHAT] = answer(asyncio.Event())
        call = stack.stub.Decode(decode_request())
        await next_chunk(call)
        await stack.connector.finish("turn-1")
        call.cancel()
        assert await stack.connector.release() == ["req-1"]
        assert stack.kvmeta.commits == []


async def test_a_turn_cancelled_while_it_waits_for_its_event_is_released(tmp_path: Path) -> None:
    async with sidecar(tmp_path, event_timeout_seconds=20) as stack:
        stack.vllm.answers[CHAT] = answer()
        call = stack.stub.Decode(decode_request())
        await next_chunk(call)
        call.cancel()
        await until(lambda: stack.worker.admission.in_flight == 0)
        await stack.connector.finish("turn-1")
        assert await stack.connector.release() == ["req-1"]
        assert stack.kvmeta.commits == []


async def test_a_turn_cancelled_during_its_commit_keeps_its_place_in_the_ledger(
    tmp_path: Path,
) -> None:
    async with sidecar(tmp_path) as stack:
        held = stack.kvmeta.hold = asyncio.Event()
        stack.vllm.answers[CHAT] = answer()
        call = stack.stub.Decode(decode_request())
        await next_chunk(call)
        await stack.connector.finish("turn-1")
        await until(lambda: stack.kvmeta.commits)
        call.cancel()
        await until(lambda: stack.worker.admission.in_flight == 0)
        held.set()
        await until(lambda: stack.kvmeta.stored)
        # Had it been released, this line would not be the first.
        await stack.connector.finish("turn-2")
        assert await stack.connector.release() == ["req-1"]
        assert stack.metric("releases_total", cause="unknown") == 1
        assert stack.metric("orphan_turns_total", cause="unknown") == 1


async def test_other_turns_are_not_disturbed(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        gate = asyncio.Event()
        stack.vllm.answers[CHAT] = answer(gate)
        calls = [stack.stub.Decode(decode_request(turn_id=f"turn-{i}")) for i in range(4)]
        for call in calls:
            assert await next_chunk(call) == FIRST
        calls[0].cancel()
        await until(lambda: stack.worker.admission.in_flight == 3)
        for i in range(1, 4):
            await stack.connector.finish(f"turn-{i}")
        gate.set()
        for call in calls[1:]:
            _, summary = await collect(call)
            assert summary.retained_tokens == 64
