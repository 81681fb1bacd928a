"""Prefill legs whose bodies go ahead, between real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvloop import rpc
from kvloop.errors import KvloopError
from kvloop.worker.v1 import worker_pb2
from services.worker import preparations
from services.worker.engine_front import HEAD_HEADER
from tests.flow.worker.stack import (
    BODY,
    CHAT,
    SidecarStack,
    prefill_reply,
    prefill_request,
    sidecar,
)
from tests.unit.worker.fake_vllm import Answer
from tests.unit.worker.fakes import until

HANDLE = b'{"remote_port":5600, "remote_block_ids":[[1, 2]]}'
HANDED = {"remote_port": 1, "kvloop_report": {"prompt_tokens": 9, "pulled_tokens": 8}}
PrepareCall = grpc.aio.UnaryUnaryCall[
    worker_pb2.PreparePrefillRequest, worker_pb2.PreparePrefillResponse
]


def _prepare(stack: SidecarStack, **changes: Any) -> PrepareCall:
    leg = prefill_request(**changes)
    return stack.stub.PreparePrefill(worker_pb2.PreparePrefillRequest(leg=leg))


def _rest() -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(
        turn_id="turn-1", transfer_params_json=HANDLE, hand_token_ids_over=True, prepared=True
    )


async def _arrived(stack: SidecarStack) -> None:
    await until(lambda: [len(each.raw) >= len(BODY) for each in stack.vllm.arriving] == [True])


async def _at_rest(stack: SidecarStack) -> None:
    await until(lambda: stack.vllm.open == 0 and stack.worker.admission.in_flight == 0)


async def _refused(call: PrepareCall | Any) -> KvloopError:
    with pytest.raises(KvloopError) as caught, rpc.typed_errors():
        await call
    return caught.value


async def test_the_engine_reads_the_body_before_the_handle_is_known(tmp_path: Path) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        stack.vllm.answers[CHAT] = prefill_reply(HANDED)
        preparing = _prepare(stack)
        await _arrived(stack)
        assert stack.worker.admission.in_flight == 0
        assert not preparing.done()

        reply = await stack.stub.Prefill(_rest())
        await preparing

        assert reply.report.pulled_tokens == 8
        [received] = stack.vllm.requests(CHAT)
        head = int(received.headers[HEAD_HEADER])
        assert json.loads(received.raw[:head] + b"}") == {
            **json.loads(BODY),
            "max_tokens": 1,
            "stream": False,
            "ignore_eos": True,
        }
        params = received.body["kv_transfer_params"]
        assert params["remote_block_ids"] == [[1, 2]]
        assert params["kvloop_hand_token_ids_over"] is True
        assert HANDLE[1:] in received.raw[head:]
        assert stack.metric("preparations_total", outcome="used") == 1
        await _at_rest(stack)


async def test_a_leg_that_nobody_prepared_can_come_again_with_its_body(tmp_path: Path) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        stack.vllm.answers[CHAT] = prefill_reply(HANDED)
        assert (await _refused(stack.stub.Prefill(_rest()))).reason == "NOT_PREPARED"
        assert stack.vllm.requests(CHAT) == []
        reply = await stack.stub.Prefill(prefill_request(transfer_params_json=HANDLE))
        assert reply.report.pulled_tokens == 8
        await _at_rest(stack)


async def test_a_leg_that_overtakes_its_body_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparations, "ARRIVAL_SECONDS", 3600)
    async with sidecar(tmp_path, "prefill") as stack:
        stack.vllm.answers[CHAT] = prefill_reply(HANDED)
        call = asyncio.ensure_future(stack.stub.Prefill(_rest()))
        await until(lambda: stack.worker.admission.in_flight)
        await _prepare(stack)
        assert (await call).report.pulled_tokens == 8
        [received] = stack.vllm.requests(CHAT)
        assert HANDLE[1:] in received.raw
        assert stack.metric("preparations_total", outcome="used") == 1
        await _at_rest(stack)


async def test_a_body_that_comes_after_its_leg_has_begun_is_turned_away(tmp_path: Path) -> None:
    """While it runs, and when it has ended."""
    async with sidecar(tmp_path, "prefill") as stack:
        held = asyncio.Event()
        stack.vllm.answers[CHAT] = prefill_reply(HANDED)
        stack.vllm.answers[CHAT].hold = held
        call = asyncio.ensure_future(stack.stub.Prefill(prefill_request()))
        await until(lambda: stack.vllm.requests(CHAT))
        assert (await _refused(_prepare(stack))).reason == "TURN_RUNNING"
        held.set()
        await call
        assert (await _refused(_prepare(stack))).reason == "TURN_RUNNING"
        assert len(stack.vllm.arriving) == 0
        await _at_rest(stack)


async def test_an_engine_that_cuts_the_connection_gets_the_handle_anew(tmp_path: Path) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        stack.vllm.answers[CHAT] = prefill_reply(HANDED)
        preparing = _prepare(stack)
        await _arrived(stack)
        stack.vllm.arriving[0].cut()
        await until(lambda: stack.vllm.open == 0)
        reply = await stack.stub.Prefill(_rest())
        await preparing
        assert reply.report.pulled_tokens == 8
        assert HANDLE[1:] in stack.vllm.requests(CHAT)[0].raw
        assert stack.metric("preparations_total", outcome="resent") == 1
        await _at_rest(stack)


async def test_an_engine_that_fails_gets_the_prompt_anew_without_the_handle(
    tmp_path: Path,
) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        held = asyncio.Event()
        stack.vllm.answers[CHAT] = Answer(status=500, body=b'{"error":{"message":"x"}}', hold=held)
        preparing = _prepare(stack)
        await _arrived(stack)
        call = asyncio.ensure_future(stack.stub.Prefill(_rest()))
        await until(lambda: len(stack.vllm.requests(CHAT)) == 1)
        stack.vllm.answers[CHAT] = prefill_reply(HANDED)
        held.set()
        await call
        await preparing
        first, second = stack.vllm.requests(CHAT)
        assert first.body["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]
        assert second.body["kv_transfer_params"]["remote_block_ids"] is None
        assert second.body["messages"] == first.body["messages"]
        await _at_rest(stack)


@pytest.mark.parametrize("when", ["before the leg", "in the leg"])
async def test_hanging_up_aborts_the_engines_request(tmp_path: Path, when: str) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        stack.vllm.answers[CHAT] = Answer(hold=asyncio.Event())
        preparing = _prepare(stack)
        await _arrived(stack)
        if when == "before the leg":
            preparing.cancel()
            await _at_rest(stack)
            assert stack.metric("preparations_total", outcome="given_up") == 1
            return
        call = stack.stub.Prefill(_rest())
        await until(lambda: stack.vllm.requests(CHAT))
        await preparing
        call.cancel()
        await _at_rest(stack)


async def test_what_cannot_be_prepared_is_refused(tmp_path: Path) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        for changes, reason, field in (
            ({"transfer_params_json": b"{}"}, "INVALID_FIELD", "leg.transfer_params_json"),
            ({"body_json": b"["}, "INVALID_FIELD", "body_json"),
            ({"body_json": b'{"n":2}'}, "NOT_SPLITTABLE", "n"),
        ):
            refused = await _refused(_prepare(stack, **changes))
            assert (refused.reason, refused.metadata.get("field")) == (reason, field)
        assert stack.vllm.open == 0
    async with sidecar(tmp_path, "decode") as stack:
        assert (await _refused(_prepare(stack))).reason == "WRONG_ROLE"
