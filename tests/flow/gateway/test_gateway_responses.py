"""POST /v1/responses: what the engines are sent, and what comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvloop.common.v1 import common_pb2
from kvloop.errors import UnavailableError
from services.router import app as router_app
from services.router.settings import RouterSettings
from tests.flow.gateway.fleet import fleet
from tests.flow.gateway.test_gateway_legs import Client, gateway
from tests.flow.gateway.test_gateway_streams import Line
from tests.flow.patience import PATIENT_ROUTER
from tests.flow.router.fakes import eventually, fake_kvmeta, raises, serve_kvmeta
from tests.flow.router.memory_ledger import MODEL, MemoryLedger
from tests.flow.sim.engines import MODEL as SIM
from tests.flow.worker.stack import sidecar
from tests.unit.worker.fake_vllm import BREAK, Answer, error_body

RESPONSES = "/v1/responses"
USAGE = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 9}, "output_tokens": 1}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "ahoy", "annotations": []}],
}
PARAMS = {"remote_host": "10.0.0.1", "remote_port": 5600}


def _response(status: str, **more: Any) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": status, "output": [], **more}


def _event(kind: str, **members: Any) -> bytes:
    """The data of an event, as vLLM writes it."""
    return json.dumps({**members, "type": kind}, separators=(",", ":")).encode()


CREATED = _event("response.created", sequence_number=0, response=_response("in_progress"))
DELTA = _event("response.output_text.delta", sequence_number=1, delta="你好👍")
DONE = _event(
    "response.completed",
    sequence_number=2,
    response=_response("completed", output=[SAID], usage=USAGE),
)


def _framed(*payloads: bytes) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (json.loads(data)["type"].encode(), data) for data in payloads
    )


def _ask(**members: Any) -> bytes:
    return json.dumps({"model": MODEL, "input": "hi", **members}).encode()


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    """One scripted decode engine behind real sidecar, router and gateway."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(sidecar(tmp_path))
        kvmeta = fake_kvmeta(MemoryLedger(), [worker.kvmeta.registered[-1].worker])
        port = await stack.enter_async_context(serve_kvmeta(*kvmeta))
        values: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "gateway_listen": "127.0.0.1:0",
            "kvmeta": f"127.0.0.1:{port}",
            "shutdown_grace_seconds": 0,
            "derive_conversations": False,
            **PATIENT_ROUTER,
        }
        router = await stack.enter_async_context(router_app.build(RouterSettings(**values)))
        await eventually(router.pool.models)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Line(worker, session, f"http://127.0.0.1:{router.gateway_port}", router, RESPONSES)


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_D6_events_come_out_as_they_went_in(line: Line, size: int) -> None:
    data = _framed(CREATED, DELTA, DONE)
    line.streams(*(data[i : i + size] for i in range(0, len(data), size)))
    reply = await line.ask(_ask(stream=True))
    assert reply.raw == data
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_D9_params_stay_inside_of_events_and_of_whole_replies(line: Line) -> None:
    inside = _response("completed", output=[SAID], kv_transfer_params=PARAMS, usage=None)
    outside = {name: v for name, v in inside.items() if name != "kv_transfer_params"}
    line.streams(
        _framed(
            _event("response.created", response=_response("queued", kv_transfer_params=None)),
            _event("response.completed", response=inside),
        )
    )
    assert (await line.ask(_ask(stream=True))).raw == _framed(
        _event("response.created", response=_response("queued")),
        _event("response.completed", response=outside),
    )
    line.answers(Answer(body=json.dumps(inside).encode()))
    assert (await line.ask(_ask())).json == outside


async def test_the_engine_is_asked_for_what_the_client_asked_for(line: Line) -> None:
    line.streams(_framed(DONE))
    await line.ask(_ask(stream=True, max_output_tokens=5, x={"y": 1.5}))
    (received,) = line.worker.vllm.requests(RESPONSES)
    assert received.body == {
        "model": MODEL,
        "input": "hi",
        "stream": True,
        "max_output_tokens": 5,
        "x": {"y": 1.5},
    }


async def test_an_engine_that_dies_in_the_middle_is_an_error_event(line: Line) -> None:
    line.streams(_framed(CREATED, DELTA), BREAK)
    reply = await line.ask(_ask(stream=True))
    assert reply.raw.startswith(_framed(CREATED, DELTA) + b"event: error\ndata: ")
    error = json.loads(reply.raw.rpartition(b"data: ")[2])
    assert (error["type"], error["code"], error["sequence_number"]) == ("error", "503", 2)
    assert "127.0.0.1" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_D8_refusals_of_the_engine_keep_status_and_body(line: Line, stream: bool) -> None:
    body = error_body("bad input", 400, param="input")
    line.answers(Answer(status=400, body=body))
    reply = await line.ask(_ask(stream=stream))
    assert (reply.status, reply.raw) == (400, body)


async def test_an_engine_without_responses_is_named_as_such(tmp_path: Path) -> None:
    async with fleet(tmp_path) as stack:
        for stream in (False, True):
            reply = await stack.post(RESPONSES, {"model": SIM, "input": "x", "stream": stream})
            assert (reply.status, reply.error["type"]) == (501, "NotImplementedError")
            assert "does not have this endpoint" in reply.error["message"]
        assert (await stack.chat([{"role": "user", "content": "hi"}])).status == 200


@pytest.mark.parametrize(
    ("member", "value"),
    [("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("background", True)],
)
async def test_what_needs_an_engine_that_remembers_is_refused(member: str, value: Any) -> None:
    async with gateway() as client:
        reply = await client.post(RESPONSES, _ask(**{member: value}))
        assert (reply.status, reply.error["param"]) == (400, member)
        assert "as input" in reply.error["message"]
        assert client.stack.worker_calls == 0
        assert (await client.post(RESPONSES, _ask(**{member: None}))).status == 200


async def test_kept_responses_are_not_found() -> None:
    async with gateway() as client:
        assert (await client.get(f"{RESPONSES}/resp_1")).error["code"] == 404
        reply = await client.post(f"{RESPONSES}/resp_1/cancel", {})
        assert "keeps none" in reply.error["message"]


@pytest.mark.parametrize(
    "members",
    [
        {"input": None},
        {"input": [7]},
        {"max_output_tokens": 0},
        {"truncation": "some"},
        {"tools": [{}]},
        {"kv_transfer_params": {}},
        {"stream": "yes"},
    ],
)
async def test_B1_bad_members_are_refused_before_prefill(members: dict[str, Any]) -> None:
    async with gateway() as client:
        reply = await client.post(RESPONSES, _ask(**members))
        assert reply.status == 400
        assert reply.error["param"].partition("[")[0] in members
        assert client.stack.worker_calls == 0


@pytest.mark.parametrize(
    "members",
    [
        {"truncation": "auto"},
        {"tools": [{"type": "mcp", "server_label": "x"}]},
        {"tools": [{"type": "function", "name": "f"}, {"type": "code_interpreter"}]},
    ],
)
async def test_C8_what_cannot_be_split_runs_on_decode_alone(members: dict[str, Any]) -> None:
    async with gateway() as client:
        assert (await client.post(RESPONSES, _ask(**members))).status == 200
        assert not client.stack["p0"].prefills
        (sent,) = client.stack["d0"].decodes
        assert not sent.HasField("commit")
        assert not sent.transfer_params_json


async def test_both_legs_are_asked_for_responses() -> None:
    async with gateway() as client:
        await client.post(RESPONSES, _ask(tools=[{"type": "function", "name": "f"}]))
        (prefill,), (decode,) = client.stack["p0"].prefills, client.stack["d0"].decodes
        assert (prefill.api, decode.api) == (common_pb2.API_RESPONSES, common_pb2.API_RESPONSES)


async def test_C6_a_missing_hand_over_is_counted() -> None:
    async with gateway() as client:
        client.stack["p0"].handover = b""
        assert (await client.post(RESPONSES, _ask())).status == 200
        assert client.stack.count("fallbacks_total", cause="no_handover") == 1


async def test_cached_tokens_are_told_in_the_words_of_responses() -> None:
    async with gateway() as client:
        client.stack["p0"].report.cached_tokens = 64
        client.stack["d0"].chunks = [CREATED, DELTA, DONE]
        reply = await client.post(RESPONSES, _ask(stream=True))
        assert reply.raw.startswith(_framed(CREATED, DELTA))
        last = json.loads(reply.raw.rpartition(b"data: ")[2])
        assert last["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 64
        client.stack["d0"].chunks = [json.dumps(_response("completed", usage=USAGE)).encode()]
        whole = (await client.post(RESPONSES, _ask())).json
        assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 64


async def test_long_input_is_left_to_the_engine_to_measure() -> None:
    async with gateway() as client:
        assert (await client.post(RESPONSES, _ask(input="x" * 100_000))).status == 200
        assert not client.stack["d0"].counts


async def test_the_openai_sdk_reads_streams_and_raises_errors() -> None:
    async with gateway() as client:
        client.stack["d0"].chunks = [CREATED, DELTA, DONE]
        async with _sdk(client) as sdk:
            events = await sdk.responses.create(model=MODEL, input="hi", stream=True)
            assert [event.type async for event in events] == [
                "response.created",
                "response.output_text.delta",
                "response.completed",
            ]
            client.stack["d0"].mid_answer_steps = [raises(UnavailableError("gone"))] * 2
            events = await sdk.responses.create(model=MODEL, input="hi", stream=True)
            assert [event.type async for event in events][-1] == "error"
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await sdk.responses.create(model=MODEL, input="x", previous_response_id="r")


def _sdk(client: Client) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
