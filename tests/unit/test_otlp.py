"""Spans of the OpenTelemetry SDK, and what happens when they cannot be sent."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from services.common import otlp
from services.common.otlp import OtlpTracing, ReportingExporter, open_tracing

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def _tracing() -> tuple[OtlpTracing, InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return OtlpTracing(provider.get_tracer("test")), kept


def test_children_are_in_the_callers_trace_and_carry_it_on() -> None:
    tracing, kept = _tracing()
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=value"}
    turn = tracing.server_span("turn", headers)
    leg = turn.child("leg")
    leg.event("first_chunk", {"size": 3})
    leg.fail("WORKER_LOST")
    carried = leg.headers()
    leg.end()
    turn.end()
    inner, outer = kept.get_finished_spans()
    assert inner.context is not None
    assert outer.context is not None
    assert outer.parent is not None
    assert inner.parent is not None
    assert (outer.context.trace_id, outer.parent.span_id) == (int(TRACE, 16), int(CALLER, 16))
    assert inner.parent.span_id == outer.context.span_id
    assert carried == {
        "traceparent": f"00-{TRACE}-{inner.context.span_id:016x}-01",
        "tracestate": "vendor=value",
    }
    assert inner.status.description == "WORKER_LOST"
    assert [(event.name, dict(event.attributes or {})) for event in inner.events] == [
        ("first_chunk", {"size": 3})
    ]


@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", f"00-{'0' * 32}-{CALLER}-01", f"ff-{TRACE}-{CALLER}-01"]
)
def test_a_malformed_context_begins_a_new_trace(traceparent: str) -> None:
    tracing, kept = _tracing()
    tracing.server_span("turn", {"traceparent": traceparent}).end()
    (span,) = kept.get_finished_spans()
    assert span.parent is None


class _Sends(SpanExporter):
    """Sends as it is told to."""

    def __init__(self, *results: SpanExportResult) -> None:
        self._results = list(results)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._results.pop(0)


def test_the_log_says_once_that_spans_are_lost_and_once_that_they_are_not() -> None:
    lost, sent = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    exporter = ReportingExporter(_Sends(sent, lost, lost, sent, sent))
    with capture_logs() as logs:
        for _ in range(5):
            exporter.export([])
    assert [entry["event"] for entry in logs] == ["spans_not_exported", "spans_exported_again"]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("listens", [False, True], ids=["refuses", "hangs"])
async def test_a_collector_that_is_away_holds_the_end_up_for_two_seconds(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "_EXPORT_SECONDS", 60.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:  # takes connections and never says a word
            silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with capture_logs() as logs:
            async with open_tracing(url, service="test", instance="", sample_ratio=1) as tracing:
                for _ in range(2000):  # several batches
                    tracing.server_span("turn", {}).end()
                leaving = time.monotonic()
            assert time.monotonic() - leaving < 30  # sending one batch takes 60 s
    assert [entry["event"] for entry in logs] == ["spans_not_exported"]


@pytest.mark.parametrize("service", ["router", "kvmeta", "worker"])
def test_services_that_do_not_trace_do_not_load_the_sdk(service: str) -> None:
    code = (
        f"import sys, services.{service}.app, services.{service}.__main__; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
