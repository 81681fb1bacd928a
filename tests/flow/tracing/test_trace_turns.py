"""Traces of turns, from a client's context to the engines, over a whole kvloop."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kvloop.router.v1 import router_pb2, router_pb2_grpc
from services.common import otlp
from services.common.process import name_trace
from services.sim.faults import XARG
from services.sim.jobs import JobMaker
from tests.flow.gateway.fleet import CHAT, PREAMBLE, Fleet, fleet
from tests.flow.sim.engines import MODEL
from tests.flow.tracing.collector import CLIENT, ERROR, SERVER, UNSET, Collector, collector

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=value"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
SAID = [{"role": "user", "content": PREAMBLE}]
CONVERSATION = "conversation-of-alice"
TURN_TREE = {
    ("kvloop-router", "turn", ""),
    ("kvloop-router", "take_handle", "turn"),
    ("kvloop-kvmeta", "TakeHandle", "take_handle"),
    ("kvloop-router", "prefill_leg", "turn"),
    ("kvloop-prefill", "prefill", "prefill_leg"),
    ("kvloop-router", "decode_leg", "turn"),
    ("kvloop-decode", "decode", "decode_leg"),
    ("kvloop-decode", "commit_turn", "decode"),
    ("kvloop-kvmeta", "CommitTurn", "commit_turn"),
}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine no span is given up that its collector would take."""
    monkeypatch.setattr(otlp, "_EXPORT_SECONDS", 60.0)
    monkeypatch.setattr(otlp, "_FLUSH_SECONDS", 60.0)


@asynccontextmanager
async def traced(tmp_path: Path, url: str, **router: Any) -> AsyncIterator[Fleet]:
    """A kvloop whose services all send spans; the last ones when the block ends."""
    on: dict[str, Any] = {"otlp_endpoint": url}
    async with fleet(tmp_path, kvmeta=on, worker=on, **on, **router) as running:
        yield running


async def chat_over_grpc(
    running: Fleet, messages: list[dict[str, Any]], metadata: Mapping[str, str]
) -> router_pb2.TurnResult:
    """One turn of a conversation with the caller's trace context."""
    request = router_pb2.ChatRequest(
        model=MODEL,
        conversation_id=CONVERSATION,
        messages=[router_pb2.ChatMessage(**message) for message in messages],
        sampling=router_pb2.SamplingParams(max_tokens=8),
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.router.port}") as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        events = [event async for event in stub.Chat(request, metadata=tuple(metadata.items()))]
    return events[-1].result


@pytest.fixture
def engine_headers(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """Headers of every request that a simulated engine gets."""
    seen: list[Mapping[str, str]] = []
    inner = JobMaker.faults

    def faults(self: JobMaker, request: Any, headers: Mapping[str, str]) -> Any:
        seen.append(dict(headers))
        return inner(self, request, headers)

    monkeypatch.setattr(JobMaker, "faults", faults)
    return seen


async def test_an_http_turn_is_one_trace_of_its_client_over_all_services(
    tmp_path: Path, engine_headers: list[Mapping[str, str]]
) -> None:
    async with collector() as sink:
        async with traced(tmp_path, sink.url) as running:
            headers = {**SAMPLED, "x-conversation-id": CONVERSATION}
            reply = await running.chat(SAID, headers, stream=True)
        assert reply.status == 200
        assert sink.tree() == TURN_TREE
        assert {span.trace_id for span in sink.spans} == {TRACE}
        assert {span.span.trace_state for span in sink.spans} == {"vendor=value"}
        turn = sink.one("kvloop-router", "turn")
        assert (turn.parent_id, turn.span.kind) == (CALLER, SERVER)
        assert sink.one("kvloop-router", "decode_leg").events == ["first_chunk"]
        assert sink.one("kvloop-router", "decode_leg").span.kind == CLIENT
        _check_engines(sink, engine_headers)


async def test_a_grpc_turn_is_one_trace_of_its_client_over_all_services(
    tmp_path: Path, engine_headers: list[Mapping[str, str]]
) -> None:
    async with collector() as sink:
        async with traced(tmp_path, sink.url) as running:
            result = await chat_over_grpc(running, SAID, SAMPLED)
        assert sink.tree() == TURN_TREE
        assert {span.trace_id for span in sink.spans} == {TRACE}
        turn = sink.one("kvloop-router", "turn")
        assert turn.parent_id == CALLER
        assert turn.attributes["kvloop.turn_id"] == result.receipt.turn_id
        _check_engines(sink, engine_headers)


async def test_the_log_names_the_trace_of_a_turn(tmp_path: Path) -> None:
    async with collector() as sink, traced(tmp_path, sink.url) as running:
        with capture_logs(processors=[name_trace]) as entries:
            await running.chat(SAID, SAMPLED)

    assert [entry["trace_id"] for entry in entries if entry["event"] == "turn"] == [TRACE]


def _check_engines(sink: Collector, seen: list[Mapping[str, str]]) -> None:
    """Each engine's spans would hang below those of its own sidecar, which time it."""
    for service, name in (("kvloop-prefill", "prefill"), ("kvloop-decode", "decode")):
        assert sink.one(service, name).events == ["engine_asked", "engine_answered"]
    assert [headers["traceparent"] for headers in seen] == [
        f"00-{TRACE}-{sink.one(service, name).span_id}-01"
        for service, name in (("kvloop-prefill", "prefill"), ("kvloop-decode", "decode"))
    ]
    assert {headers["tracestate"] for headers in seen} == {"vendor=value"}


async def test_the_receipt_of_each_turn_is_on_its_span(tmp_path: Path) -> None:
    async with collector() as sink:
        async with traced(tmp_path, sink.url) as running:
            headers = {"x-conversation-id": CONVERSATION}
            answer = (await running.chat(SAID, headers)).json["choices"][0]["message"]
            said = {"role": "assistant", "content": answer["content"]}
            more = [*SAID, said, {"role": "user", "content": "and then?"}]
            receipt = (await chat_over_grpc(running, more, {})).receipt
        first, second = (s.attributes for s in sink.spans if s.span.name == "turn")
        assert second["kvloop.turn_id"] == receipt.turn_id
        assert (first["kvloop.handle_hit"], first["kvloop.miss_reason"]) == (False, "FIRST_TURN")
        assert second["kvloop.handle_hit"] is True
        assert "kvloop.miss_reason" not in second
        assert (first["kvloop.turn_number"], second["kvloop.turn_number"]) == (1, 2)
        report = receipt.prefill
        assert report.pulled_tokens > 0
        told = {
            name: second[f"kvloop.{name}_tokens"]
            for name in ("prompt", "proven", "pulled", "cached", "recomputed", "retained")
        }
        assert told == {
            "prompt": report.prompt_tokens,
            "proven": report.proven_tokens,
            "pulled": report.pulled_tokens,
            "cached": report.cached_tokens,
            "recomputed": report.recomputed_tokens,
            "retained": receipt.retained_tokens,
        }
        ttft = receipt.ttft.ToTimedelta().total_seconds()
        assert second["kvloop.ttft_seconds"] == pytest.approx(ttft, abs=1e-6)
        assert second["kvloop.model"] == MODEL
        assert second["kvloop.outcome"] == "answered"
        workers = second["kvloop.prefill_worker_id"], second["kvloop.decode_worker_id"]
        assert workers == ("prefill-0", "decode-0")
        # Without a client's context each turn is a trace of its own.
        assert len({span.trace_id for span in sink.spans}) == 2


async def test_no_span_has_content_or_says_who_spoke(tmp_path: Path) -> None:
    secret = "platypus"
    async with collector() as sink:
        async with traced(tmp_path, sink.url) as running:
            said = [{"role": "user", "content": f"{secret} " * 20}]
            body = {"model": MODEL, "messages": said, "max_tokens": 8}
            headers = {"x-conversation-id": CONVERSATION}
            assert (await running.post(CHAT, body, headers)).status == 200
            # Engines quote what they refuse, and a model's name is any text.
            asked = {**body, "vllm_xargs": {XARG: secret}}
            bad = await running.post(CHAT, asked, headers)
            assert secret in bad.raw.decode()
            unknown = await running.post(CHAT, {**body, "model": secret}, headers)
            assert (bad.status, unknown.status) == (400, 404)
        assert len([s for s in sink.spans if s.span.name == "turn"]) == 3
        sent = b"".join(sink.raw)
        assert secret.encode() not in sent
        assert CONVERSATION.encode() not in sent


async def test_failures_and_refusals_are_told_by_their_reasons(tmp_path: Path) -> None:
    async with collector() as sink:
        async with traced(tmp_path, sink.url) as running:
            unknown = {"model": "none", "messages": SAID}
            assert (await running.post(CHAT, unknown)).status == 404
            running.workers[1].admission.drain()
            reply = await running.chat(SAID)
            assert reply.status == 503
        refused, failed = (s for s in sink.spans if s.span.name == "turn")
        assert refused.attributes["error.type"] == "MODEL_NOT_FOUND"
        assert refused.span.status.code == UNSET
        assert failed.span.status.code == ERROR
        reason = failed.attributes["error.type"]
        assert failed.span.status.message == reason
        assert failed.attributes["kvloop.outcome"] == "failed"
        leg = sink.one("kvloop-router", "decode_leg")
        assert (leg.attributes["error.type"], leg.events[0]) == (reason, "attempt_failed")


async def test_clients_decide_about_sampling_and_others_by_the_ratio(
    tmp_path: Path, engine_headers: list[Mapping[str, str]]
) -> None:
    async with collector() as sink:
        async with traced(tmp_path, sink.url, trace_sample_ratio=0.0) as running:
            for headers in (NOT_SAMPLED, {}, SAMPLED):
                assert (await running.chat(SAID, headers)).status == 200
        assert len([s for s in sink.spans if s.span.name == "turn"]) == 1
        assert {span.trace_id for span in sink.spans} == {TRACE}
        # What is not recorded is still passed on, with the decision.
        flags = [int(headers["traceparent"][-2:], 16) for headers in engine_headers]
        assert [bool(flag & 1) for flag in flags] == [False] * 4 + [True] * 2


async def test_nothing_is_sent_or_passed_on_by_default(
    tmp_path: Path, engine_headers: list[Mapping[str, str]]
) -> None:
    async with fleet(tmp_path) as running:
        assert (await running.chat(SAID, SAMPLED)).status == 200
    assert len(engine_headers) == 2
    assert all("traceparent" not in headers for headers in engine_headers)


async def test_a_collector_that_hangs_delays_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # so that sending begins at once
    monkeypatch.setattr(otlp, "_FLUSH_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # never says a word
        async with traced(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}") as running:
            for _ in range(5):
                started = time.monotonic()
                assert (await running.chat(SAID, SAMPLED)).status == 200
                assert time.monotonic() - started < 30  # sending one batch takes 60 s
