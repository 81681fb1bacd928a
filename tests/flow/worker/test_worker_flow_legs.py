"""Both legs through a whole sidecar."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import (
    ConflictError,
    InternalError,
    InvalidFieldError,
    ModelNotFoundError,
    PreconditionError,
    UnavailableError,
)
from kvloop.worker.v1 import worker_pb2
from tests.flow.worker.stack import (
    CHAT,
    ENGINE_REF,
    FIRST,
    KEY,
    LAST,
    SILENT_ENGINE,
    USAGE,
    answer,
    collect,
    decode_request,
    next_chunk,
    next_event,
    prefill_reply,
    prefill_request,
    sidecar,
)
from tests.unit.worker.fake_vllm import BREAK, Answer, error_body, sse
from tests.unit.worker.fakes import PARAMS, until

OUTCOMES = worker_pb2.CommitOutcome


async def test_prefill_hands_over_and_reports(tmp_path: Path) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        report = {
            "prompt_tokens": 9,
            "proven_tokens": 8,
            "pulled_tokens": 0,
            "cached_tokens": 8,
            "recomputed_tokens": 1,
            "miss_reason": "CACHED",
        }
        stack.vllm.answers[CHAT] = prefill_reply({"remote_port": 1, "kvloop_report": report})
        handle = b'{"do_remote_decode":true, "remote_block_ids":[[1, 2]]}'
        reply = await stack.stub.Prefill(prefill_request(transfer_params_json=handle))
        (request,) = stack.vllm.requests(CHAT)
    assert handle[1:] in request.raw
    assert request.body["max_tokens"] == 1
    assert request.body["kv_transfer_params"]["kvloop_turn_id"] == "turn-1"
    assert reply.transfer_params_json.startswith(b'{"remote_port":1,')
    assert reply.report == common_pb2.PrefillReport(
        prompt_tokens=9,
        proven_tokens=8,
        cached_tokens=8,
        recomputed_tokens=1,
        miss_reason=common_pb2.MISS_REASON_CACHED,
    )


async def test_a_miss_reason_of_a_newer_connector_is_unspecified(tmp_path: Path) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        stack.vllm.answers[CHAT] = prefill_reply({"kvloop_report": {"miss_reason": "FROM_FUTURE"}})
        reply = await stack.stub.Prefill(prefill_request())
    assert reply.report.miss_reason == common_pb2.MISS_REASON_UNSPECIFIED


async def test_decode_commits_before_the_chunk_that_ends_the_answer(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        held = stack.kvmeta.hold = asyncio.Event()
        stack.vllm.answers[CHAT] = answer()
        call = stack.stub.Decode(decode_request(transfer_params_json=b'{"remote_port": 1}'))
        assert await next_chunk(call) == FIRST
        await stack.connector.finish("turn-1")
        await until(lambda: stack.kvmeta.commits)
        held.set()
        chunks, summary = await collect(call)
        (commit,) = stack.kvmeta.commits
        (request,) = stack.vllm.requests(CHAT)
    assert chunks == [LAST, USAGE]
    assert summary.usage == common_pb2.Usage(prompt_tokens=5, completion_tokens=2)
    assert summary.commit_outcome == OUTCOMES.COMMIT_OUTCOME_COMMITTED
    assert (summary.retained_tokens, summary.granted_ttl.seconds) == (64, 470)
    assert commit.transfer_params_json == PARAMS
    assert (commit.key, commit.turn, commit.request_id) == (KEY, 3, "turn-1")
    assert (commit.worker_id, commit.engine) == ("decode-0", ENGINE_REF)
    assert b'"remote_port": 1}' in request.raw


async def test_events_that_arrive_together_are_one_batch_to_who_accepts_it(
    tmp_path: Path,
) -> None:
    async with sidecar(tmp_path) as stack:
        for accept, kinds in (
            (True, ["batch", "batch"]),
            (False, ["chunk_json"] * 4 + ["summary"]),
        ):
            stack.vllm.answers[CHAT] = Answer(steps=[b"".join(sse(FIRST, FIRST, LAST, USAGE))])
            request = decode_request(turn_id=f"turn-{accept}", accept_batches=accept)
            call = stack.stub.Decode(request)
            first = await next_event(call)
            assert first is not None
            events = [first]
            await stack.connector.finish(f"turn-{accept}")
            while (event := await next_event(call)) is not None:
                events.append(event)
            assert [event.WhichOneof("event") for event in events] == kinds
            assert events[-1].batch.HasField("summary") is accept


async def test_a_prompt_is_not_read_where_its_place_is_told(tmp_path: Path) -> None:
    body = b'{"model":"tiny","messages":[1, 2],"temperature":1.50}'
    place = worker_pb2.Span(start=body.index(b"["), end=body.index(b"]") + 1)
    async with sidecar(tmp_path, "prefill") as stack:
        stack.vllm.answers[CHAT] = prefill_reply({})
        await stack.stub.Prefill(prefill_request(body_json=body, prompt=place))
        (request,) = stack.vllm.requests(CHAT)
    assert b'"messages":[1, 2],"temperature":1.50' in request.raw


async def test_an_event_that_comes_before_the_last_chunk_is_used(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        gate = asyncio.Event()
        stack.vllm.answers[CHAT] = answer(gate)
        call = stack.stub.Decode(decode_request())
        assert await next_chunk(call) == FIRST
        await stack.connector.finish("turn-1")
        gate.set()
        chunks, summary = await collect(call)
    assert chunks == [LAST, USAGE]
    assert summary.commit_outcome == OUTCOMES.COMMIT_OUTCOME_COMMITTED


async def test_a_superseded_turn_is_released_through_the_event_socket(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        stack.kvmeta.error = ConflictError("newer", reason="TURN_SUPERSEDED")
        stack.vllm.answers[CHAT] = answer()
        call = stack.stub.Decode(decode_request())
        assert await next_chunk(call) == FIRST
        await stack.connector.finish("turn-1")
        chunks, summary = await collect(call)
        assert await stack.connector.release() == ["req-1"]
    assert chunks == [LAST, USAGE]
    assert summary.commit_outcome == OUTCOMES.COMMIT_OUTCOME_SUPERSEDED


async def test_without_a_report_from_the_engine_the_answer_is_whole(tmp_path: Path) -> None:
    async with sidecar(tmp_path, **SILENT_ENGINE) as stack:
        stack.vllm.answers[CHAT] = answer()
        chunks, summary = await collect(stack.stub.Decode(decode_request()))
        assert stack.metric("commits_total", outcome="NO_EVENT") == 1
        await stack.connector.finish("turn-1")
        assert await stack.connector.release() == ["req-1"]
    assert chunks == [FIRST, LAST, USAGE]
    assert summary.commit_outcome == OUTCOMES.COMMIT_OUTCOME_NO_EVENT


async def test_a_turn_without_conversation_is_not_committed(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        stack.vllm.answers[CHAT] = answer()
        request = decode_request()
        request.ClearField("commit")
        chunks, summary = await collect(stack.stub.Decode(request))
        assert stack.kvmeta.commits == []
    assert chunks == [FIRST, LAST, USAGE]
    assert summary.commit_outcome == OUTCOMES.COMMIT_OUTCOME_NOT_REQUESTED


@pytest.mark.parametrize(
    ("engine_answer", "kind", "reason", "http_status"),
    [
        (
            Answer(status=400, body=error_body("too long", 400, param="messages")),
            InvalidFieldError,
            "ENGINE_REJECTED",
            "400",
        ),
        (
            Answer(status=404, body=error_body("no", 404, "NotFoundError")),
            ModelNotFoundError,
            "MODEL_NOT_FOUND",
            "404",
        ),
        (Answer(status=500, body=error_body("oops", 500)), InternalError, "ENGINE_FAILED", "500"),
        (Answer(steps=[BREAK]), UnavailableError, "ENGINE_LOST", None),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_engines_errors_reach_the_router_typed(
    tmp_path: Path, role, engine_answer, kind, reason, http_status
) -> None:
    async with sidecar(tmp_path, role) as stack:
        stack.vllm.answers[CHAT] = engine_answer
        leg = (
            stack.stub.Prefill(prefill_request())
            if role == "prefill"
            else collect(stack.stub.Decode(decode_request()))
        )
        with pytest.raises(kind) as caught, rpc.typed_errors():
            await leg
        assert stack.worker.admission.in_flight == 0
    assert caught.value.reason == reason
    assert caught.value.metadata.get("http_status") == http_status


async def test_an_error_in_the_middle_of_a_stream_comes_after_the_chunks_before_it(
    tmp_path: Path,
) -> None:
    async with sidecar(tmp_path) as stack:
        stack.vllm.answers[CHAT] = Answer(steps=sse(FIRST, error_body("oops", 500)))
        call = stack.stub.Decode(decode_request())
        assert await next_chunk(call) == FIRST
        with pytest.raises(InternalError, match="oops"), rpc.typed_errors():
            await next_chunk(call)


async def test_prefill_that_fails_with_the_handle_is_repeated_without_it(tmp_path: Path) -> None:
    async with sidecar(tmp_path, "prefill") as stack:
        failed = Answer(status=500, body=error_body("KV load failed", 500), hold=asyncio.Event())
        stack.vllm.answers[CHAT] = failed
        call = stack.stub.Prefill(prefill_request(transfer_params_json=b'{"remote_port":1}'))
        await until(lambda: stack.vllm.requests(CHAT))
        stack.vllm.answers[CHAT] = prefill_reply({"remote_port": 2})
        assert failed.hold is not None
        failed.hold.set()
        reply = await call
    assert reply.transfer_params_json == b'{"remote_port":2}'
    assert reply.report.miss_reason == common_pb2.MISS_REASON_PULL_FAILED


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"turn_id": ""}, "turn_id"),
        ({"turn_id": "x" * 65}, "turn_id"),
        ({"api": common_pb2.API_UNSPECIFIED}, "api"),
        ({"body_json": b""}, "body_json"),
        ({"body_json": b"[]"}, "body_json"),
        ({"body_json": b'{"kv_transfer_params":{}}'}, "kv_transfer_params"),
        ({"transfer_params_json": b"null"}, "transfer_params_json"),
        (
            {"commit": worker_pb2.TurnRef(key=common_pb2.ConversationKey(tenant="t"))},
            "commit.key.model",
        ),
    ],
)
async def test_bad_requests_name_the_field_and_never_reach_the_engine(
    tmp_path: Path, changes, field
) -> None:
    async with sidecar(tmp_path) as stack:
        with pytest.raises(InvalidFieldError) as caught, rpc.typed_errors():
            await collect(stack.stub.Decode(decode_request(**changes)))
        assert stack.vllm.requests(CHAT) == []
    assert caught.value.field == field


async def test_the_other_leg_is_refused(tmp_path: Path) -> None:
    async with sidecar(tmp_path) as stack:
        with pytest.raises(PreconditionError) as caught, rpc.typed_errors():
            await stack.stub.Prefill(prefill_request())
    assert caught.value.reason == "WRONG_ROLE"
    async with sidecar(tmp_path, "prefill") as stack:
        with pytest.raises(PreconditionError) as caught, rpc.typed_errors():
            await collect(stack.stub.Decode(decode_request()))
    assert caught.value.reason == "WRONG_ROLE"


async def test_five_mebibytes_pass_both_ways(tmp_path: Path) -> None:
    text = "x" * 5_000_000
    async with sidecar(tmp_path) as stack:
        huge = b'{"choices":[{"delta":{"content":"' + text.encode() + b'"},"finish_reason":null}]}'
        stack.vllm.answers[CHAT] = Answer(steps=sse(huge))
        request = decode_request(body_json=b'{"prompt":"' + text.encode() + b'"}')
        request.ClearField("commit")
        chunks, _ = await collect(stack.stub.Decode(request))
        assert len(stack.vllm.requests(CHAT)[0].body["prompt"]) == 5_000_000
    assert chunks == [huge]
