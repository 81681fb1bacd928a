"""Spans: which is the current one, what is recorded of errors, what callers carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from kvloop.errors import InvalidFieldError, UnavailableError
from services.common import tracing
from services.common.process import name_trace
from services.common.tracing import NO_HEADERS, NO_SPAN, Attributes, carried, child_span, running
from services.common.tracing_settings import TracingSettings


@dataclass
class KeptSpan:
    """A span that keeps what it is told. See `Span`."""

    name: str
    recording: bool = True
    trace_id: str = ""
    attributes: dict[str, object] = field(default_factory=dict)
    failure: str = ""
    ended: bool = False
    children: list[KeptSpan] = field(default_factory=list)

    def tell(self, attributes: Attributes) -> None:
        self.attributes |= attributes

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        self.attributes[name] = attributes

    def fail(self, reason: str) -> None:
        self.failure = reason

    def child(self, name: str) -> KeptSpan:
        self.children.append(KeptSpan(name))
        return self.children[-1]

    def headers(self) -> Mapping[str, str]:
        return {"traceparent": self.name}

    def end(self) -> None:
        self.ended = True


def test_calls_carry_the_innermost_span_and_afterwards_the_one_before() -> None:
    outer = KeptSpan("outer")
    with running(outer):
        with child_span("inner"):
            assert tracing.metadata() == (("traceparent", "inner"),)
        assert outer.children[0].ended
        assert tracing.metadata() == (("traceparent", "outer"),)
        assert not outer.ended
    assert outer.ended
    assert tracing.current() is NO_SPAN


def test_log_entries_name_the_trace_in_which_they_are_written() -> None:
    with running(KeptSpan("turn", trace_id="4bf9")):
        inside = name_trace(None, "info", {"event": "turn_ended"})
    outside = name_trace(None, "info", {"event": "registry_joined"})

    assert inside == {"event": "turn_ended", "trace_id": "4bf9"}
    assert outside == {"event": "registry_joined"}


async def test_a_task_started_within_a_span_goes_on_with_it() -> None:
    go_on = asyncio.Event()

    async def later() -> object:
        await go_on.wait()
        return tracing.metadata()

    async with asyncio.TaskGroup() as tasks:
        with running(KeptSpan("turn")):
            task = tasks.create_task(later())
        assert tracing.metadata() is None
        go_on.set()
    assert task.result() == (("traceparent", "turn"),)


async def test_a_generator_closed_by_another_task_ends_its_span() -> None:
    span = KeptSpan("stream")

    async def stream() -> AsyncIterator[int]:
        with running(span):
            yield 1

    events = stream()
    assert await anext(events) == 1
    # Another task has another context, where a token of this one would be refused.
    await asyncio.create_task(events.aclose())  # type: ignore[attr-defined]
    assert span.ended
    assert span.attributes == {tracing.CANCELLED: True}
    assert span.failure == ""


@pytest.mark.parametrize(
    ("error", "failure", "attributes"),
    [
        (UnavailableError("secret", reason="WORKER_LOST"), "WORKER_LOST", {}),
        (InvalidFieldError("secret"), "", {"error.type": "INVALID_FIELD"}),
        (ValueError("secret"), "ValueError", {}),
        (asyncio.CancelledError("secret"), "", {"kvloop.cancelled": True}),
    ],
    ids=["ours", "the caller's", "a defect", "cancelled"],
)
def test_errors_are_recorded_by_their_reason_alone(
    error: BaseException, failure: str, attributes: dict[str, object]
) -> None:
    span = KeptSpan("turn")
    with pytest.raises(type(error)), running(span):
        raise error
    assert (span.failure, span.attributes, span.ended) == (failure, attributes, True)


async def test_where_nothing_is_traced_nothing_is_made_or_carried() -> None:
    with running(NO_SPAN), child_span("leg") as span:
        assert span is NO_SPAN
        assert tracing.metadata() is None
        assert tracing.current().headers() is NO_HEADERS
        assert not span.recording


def test_only_trace_headers_are_taken_over() -> None:
    headers: list[tuple[str, str | bytes]] = [
        ("authorization", "Bearer secret"),
        ("traceparent", "00-1-2-01"),
        ("tracestate", "a=1"),
        ("baggage", "who=alice"),
        ("tracestate", "b=2"),
        ("grpc-trace-bin", b"\x00"),
    ]
    assert carried(headers) == {"traceparent": "00-1-2-01", "tracestate": "a=1,b=2"}
    assert carried([("authorization", "Bearer secret")]) is NO_HEADERS


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://collector:4317", "http://"])
def test_an_endpoint_must_be_a_url(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="expected http://host:port"):
        TracingSettings(otlp_endpoint=endpoint)


def test_without_the_extra_the_endpoint_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("services.common.tracing_settings.import_module", nothing)
    with pytest.raises(ValidationError, match=r"pip install kvloop\[tracing\]"):
        TracingSettings(otlp_endpoint="http://127.0.0.1:4317")
    assert TracingSettings().otlp_endpoint == ""
