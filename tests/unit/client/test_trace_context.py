"""Turns join the trace of the caller's current span, if it has one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanContext, format_span_id, format_trace_id

from kvloop.trace_context import trace_context
from tests.unit.client.fake_router import FakeRouter


def _traceparent(context: SpanContext) -> str:
    trace_id, span_id = format_trace_id(context.trace_id), format_span_id(context.span_id)
    return f"00-{trace_id}-{span_id}-{context.trace_flags:02x}"


@pytest.mark.parametrize("method", ["chat", "generate"])
async def test_a_turn_carries_the_callers_span(
    client: Any, router: FakeRouter, method: str
) -> None:
    said = [{"role": "user", "content": "hello"}] if method == "chat" else "hello"
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("caller")
    with tracer.start_as_current_span("agent step") as span:
        await getattr(client, method)(said, model="m").collect()
    assert router.metadata["traceparent"] == _traceparent(span.get_span_context())

    await getattr(client, method)(said, model="m").collect()
    assert "traceparent" not in router.metadata


def test_a_caller_without_opentelemetry_does_not_get_it() -> None:
    code = (
        "import sys, kvloop, kvloop.trace_context as context; "
        "assert context.trace_context() == (); assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=25)
    assert trace_context() == ()
