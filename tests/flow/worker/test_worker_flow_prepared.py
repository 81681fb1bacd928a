"""Decode legs whose bodies go ahead, between real sockets."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import (
    InvalidFieldError,
    KvloopError,
    LimitError,
    PreconditionError,
    UnavailableError,
)
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.worker import preparations
from services.worker.engine_front import HEAD_HEADER
from tests.flow.worker.stack import (
    BODY,
    CHAT,
    FIRST,
    SILENT_ENGINE,
    SidecarStack,
    answer,
    collect,
    decode_request,
    next_chunk,
    sidecar,
)
from tests.unit.worker.fake_vllm import Answer
from tests.unit.worker.fakes import until

PARAMS = b'{"remote_port":5600, "remote_block_ids":[[1, 2]]}'
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PrepareCall = grpc.aio.UnaryUnaryCall[
    worker_pb2.PrepareDecodeRequest, worker_pb2.PrepareDecodeResponse
]


def _prepare(stack: SidecarStack, **changes: Any) -> PrepareCall:
    leg = decode_request(**changes)
    return stack.stub.PrepareDecode(worker_pb2.PrepareDecodeRequest(leg=leg))


def _rest(turn_id: str = "turn-1") -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(
        turn_id=turn_id, transfer_params_json=PARAMS, accept_batches=False, prepared=True
    )


async def _arrived(stack: SidecarStack, count: int = 1) -> None:
    await until(
        lambda: [len(each.raw) >= len(BODY) for each in stack.vllm.arriving] == [True] * count
    )


async def _at_rest(stack: SidecarStack) -> None:
    """Nothing is open at the engine, and no leg runs."""
    await until(lambda: stack.vllm.open == 0 and stack.worker.admission.in_flight == 0)


async def _refused(call: Any) -> KvloopError:
    with pytest.raises(KvloopError) as caught, rpc.typed_errors():
        await call if isinstance(call, grpc.aio.UnaryUnaryCall) else await call.read()
    return caught.value


async def test_the_engine_reads_the_body_before_the_params_are_known(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        gate = asyncio.Event()
        stack.vllm.answers[CHAT] = answer(gate)
        context = common_pb2.TraceContext(traceparent=TRACE)
        preparing = _prepare(stack, trace_context=context)
        await _arrived(stack)
        assert stack.worker.admission.in_flight == 0
        assert not preparing.done()

        call = stack.stub.Decode(_rest())
        assert await next_chunk(call) == FIRST
        await preparing
        await stack.connector.finish("turn-1")
        gate.set()
        _, summary = await collect(call)

        assert summary.commit_outcome == worker_pb2.COMMIT_OUTCOME_COMMITTED
        assert stack.kvmeta.commits[0].turn == 3
        [received] = stack.vllm.requests(CHAT)
        head = int(received.headers[HEAD_HEADER])
        assert json.loads(received.raw[:head] + b"}") == {
            **json.loads(BODY),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert PARAMS[1:] in received.raw[head:]
        assert received.body["kv_transfer_params"]["kvloop_turn_id"] == "turn-1"
        assert received.headers["traceparent"] == TRACE
        assert stack.metric("preparations_total", outcome="used") == 1
        await _at_rest(stack)


async def test_a_leg_that_nobody_prepared_can_come_again_with_its_body(tmp_path: Path) -> None:
    async with sidecar(tmp_path, **SILENT_ENGINE) as stack:
        stack.vllm.answers[CHAT] = answer()
        refused = await _refused(stack.stub.Decode(_rest()))
        assert isinstance(refused, PreconditionError)
        assert refused.reason == "NOT_PREPARED"
        chunks, _ = await collect(stack.stub.Decode(decode_request(transfer_params_json=PARAMS)))
        assert chunks[0] == FIRST
        await _at_rest(stack)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leg that waits until its time is up fails its test."""
    monkeypatch.setattr(preparations, "ARRIVAL_SECONDS", 3600)


@pytest.mark.usefixtures("patience")
async def test_a_leg_that_overtakes_its_body_gets_it(tmp_path: Path) -> None:
    async with sidecar(tmp_path, **SILENT_ENGINE) as stack:
        stack.vllm.answers[CHAT] = answer()
        call = stack.stub.Decode(_rest())
        await until(lambda: stack.worker.admission.in_flight)
        await _prepare(stack)
        chunks, _ = await collect(call)
        assert chunks[0] == FIRST
        [received] = stack.vllm.requests(CHAT)
        assert received.body["kv_transfer_params"]["remote_port"] == 5600
        assert stack.metric("preparations_total", outcome="used") == 1
        await _at_rest(stack)


@pytest.mark.usefixtures("patience")
async def test_a_long_body_and_its_leg_come_in_either_order(tmp_path: Path) -> None:
    """On one connection, as from a router; short messages may go between pieces of long ones."""
    long = BODY.replace(b"hi", b"hi" * 1_500_000)
    async with sidecar(tmp_path, **SILENT_ENGINE) as stack:
        for number in range(5):
            turn_id = f"turn-{number}"
            stack.vllm.answers[CHAT] = answer()
            preparing = _prepare(stack, turn_id=turn_id, body_json=long)
            chunks, _ = await collect(stack.stub.Decode(_rest(turn_id)))
            await preparing
            assert chunks[0] == FIRST
        assert len(stack.vllm.requests(CHAT)) == 5
        assert stack.metric("preparations_total", outcome="used") == 5
        await _at_rest(stack)


@pytest.mark.usefixtures("patience")
async def test_a_leg_that_waits_is_turned_away_when_its_body_is_refused(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        call = stack.stub.Decode(_rest())
        await until(lambda: stack.worker.admission.in_flight)
        assert (await _refused(_prepare(stack, body_json=b"["))).reason == "INVALID_FIELD"
        assert (await _refused(call)).reason == "NOT_PREPARED"
        await _at_rest(stack)


@pytest.mark.usefixtures("patience")
async def test_cancelling_a_leg_that_waits_leaves_nothing(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        call = stack.stub.Decode(_rest())
        await until(lambda: stack.worker.admission.in_flight)
        call.cancel()
        await _at_rest(stack)
        assert (await _refused(_prepare(stack))).reason == "TURN_RUNNING"
        assert stack.vllm.arriving == []


async def test_a_body_that_comes_after_its_leg_has_begun_is_turned_away(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        stack.vllm.answers[CHAT] = answer(asyncio.Event())
        call = stack.stub.Decode(decode_request())
        await next_chunk(call)
        assert (await _refused(_prepare(stack))).reason == "TURN_RUNNING"
        call.cancel()
        await _at_rest(stack)


async def test_a_body_that_comes_again_with_its_leg_ends_the_one_that_waits(
    tmp_path: Path,
) -> None:
    async with sidecar(tmp_path, **SILENT_ENGINE) as stack:
        stack.vllm.answers[CHAT] = answer()
        preparing = _prepare(stack)
        await _arrived(stack)
        await collect(stack.stub.Decode(decode_request()))
        assert (await _refused(preparing)).reason == "TURN_RUNNING"
        await _at_rest(stack)
        assert len(stack.vllm.requests(CHAT)) == 1


async def test_cancelling_the_call_that_brought_a_body_gives_it_up(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        preparing = _prepare(stack)
        await _arrived(stack)
        preparing.cancel()
        await _at_rest(stack)
        assert (await _refused(stack.stub.Decode(_rest()))).reason == "NOT_PREPARED"
        assert stack.metric("preparations_total", outcome="given_up") == 1


async def test_cancelling_it_once_the_leg_has_begun_disturbs_nobody(tmp_path: Path) -> None:
    async with sidecar(tmp_path, **SILENT_ENGINE) as stack:
        held = asyncio.Event()
        stack.vllm.answers[CHAT] = answer()
        stack.vllm.answers[CHAT].hold = held
        preparing = _prepare(stack)
        await _arrived(stack)
        call = stack.stub.Decode(_rest())
        await until(lambda: stack.vllm.requests(CHAT))
        preparing.cancel()
        held.set()
        chunks, _ = await collect(call)
        assert chunks[0] == FIRST
        await _at_rest(stack)


@pytest.mark.parametrize("held", [True, False])
async def test_cancelling_a_prepared_leg_aborts_the_engines_request(
    tmp_path: Path, held: bool
) -> None:
    """While it waits for the reply to begin, and in the middle of it."""
    async with sidecar(tmp_path) as stack:
        stack.vllm.answers[CHAT] = answer(asyncio.Event())
        if held:
            stack.vllm.answers[CHAT].hold = asyncio.Event()
        preparing = _prepare(stack)
        await _arrived(stack)
        call = stack.stub.Decode(_rest())
        await until(lambda: stack.vllm.requests(CHAT))
        await preparing
        if not held:
            await next_chunk(call)
        call.cancel()
        async with asyncio.timeout(10):
            await stack.vllm.requests(CHAT)[0].disconnected.wait()
        await _at_rest(stack)


async def test_an_engine_that_cuts_the_connection_gets_the_request_anew(tmp_path: Path) -> None:
    async with sidecar(tmp_path, **SILENT_ENGINE) as stack:
        stack.vllm.answers[CHAT] = answer()
        preparing = _prepare(stack)
        await _arrived(stack)
        stack.vllm.arriving[0].cut()
        await until(lambda: stack.vllm.open == 0)
        chunks, _ = await collect(stack.stub.Decode(_rest()))
        await preparing
        assert chunks[0] == FIRST
        assert PARAMS[1:] in stack.vllm.requests(CHAT)[0].raw
        assert stack.metric("preparations_total", outcome="resent") == 1
        await _at_rest(stack)


async def test_what_cannot_be_prepared_is_refused(tmp_path: Path) -> None:
    async with sidecar(tmp_path, engine_max_connections=5) as stack:
        for changes, reason, field in (
            ({"transfer_params_json": b"{}"}, "INVALID_FIELD", "leg.transfer_params_json"),
            ({"body_json": b"["}, "INVALID_FIELD", "body_json"),
            ({"body_json": b'{"n":2}'}, "NOT_SPLITTABLE", "n"),
            ({"turn_id": ""}, "INVALID_FIELD", "turn_id"),
            ({"api": common_pb2.API_UNSPECIFIED}, "INVALID_FIELD", "api"),
        ):
            refused = await _refused(_prepare(stack, **changes))
            assert isinstance(refused, InvalidFieldError)
            assert (refused.reason, refused.field) == (reason, field)
        assert (await _refused(stack.stub.PrepareDecode(worker_pb2.PrepareDecodeRequest()))).reason
        waiting = [_prepare(stack, turn_id=f"turn-{number}") for number in range(2)]
        await _arrived(stack, 2)
        refused = await _refused(_prepare(stack, turn_id="turn-2"))
        assert isinstance(refused, LimitError)
        assert refused.reason == "TOO_MANY_PREPARED"
        for call in waiting:
            call.cancel()
        await _at_rest(stack)


async def test_a_prefill_worker_prepares_nothing(tmp_path: Path) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        assert (await _refused(_prepare(stack))).reason == "WRONG_ROLE"


async def test_a_worker_that_leaves_gives_up_what_waits_at_once(tmp_path: Path) -> None:
    began = asyncio.get_running_loop().time()
    async with AsyncExitStack() as outside:
        async with sidecar(tmp_path, grace_seconds=60) as stack:
            # One that is still open when the worker leaves.
            channel = rpc.open_channel(f"127.0.0.1:{stack.worker.port}")
            stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(
                await outside.enter_async_context(channel)
            )
            preparing = stub.PrepareDecode(worker_pb2.PrepareDecodeRequest(leg=decode_request()))
            await _arrived(stack)
        refused = await _refused(preparing)
    assert isinstance(refused, UnavailableError)
    assert refused.reason == "DRAINING"
    assert asyncio.get_running_loop().time() - began < 30
    assert stack.vllm.open == 0


async def test_an_engine_that_dies_takes_prepared_legs_with_it(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        stack.vllm.answers[CHAT] = Answer(hold=asyncio.Event())
        preparing = _prepare(stack)
        await _arrived(stack)
        call = stack.stub.Decode(_rest())
        await until(lambda: stack.vllm.requests(CHAT))
        await preparing
        stack.vllm.cut_all()
        assert (await _refused(call)).reason == "ENGINE_LOST"
        await _at_rest(stack)
