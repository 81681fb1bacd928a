"""Spans sent to an OpenTelemetry collector. Imported only where that is wanted.

The SDK's batch processor hands spans to a thread of its own over a bounded queue.
A collector that is slow or away costs spans, never a turn's time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as RecordedSpan
from opentelemetry.trace import (
    SpanKind,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common.tracing import ERROR_TYPE, Attributes, Span, Tracing

_log = structlog.get_logger(__name__)

_QUEUED_SPANS = 8192
"""Spans that wait to be sent at most, a few kilobytes each; more are dropped."""
_EXPORT_SECONDS = 5.0
"""How long the sending of one batch may take, repeats included."""
_FLUSH_SECONDS = 2.0
"""How long the last spans may take at shutdown."""


class OtlpSpan:
    """A span of the OpenTelemetry SDK. See `Span`."""

    __slots__ = ("_context", "_propagator", "_span", "_tracer")

    def __init__(
        self, tracer: Tracer, propagator: TraceContextTextMapPropagator, span: RecordedSpan
    ) -> None:
        self._tracer = tracer
        self._propagator = propagator
        self._span = span
        # An empty context besides: the process's own must not leak in.
        self._context = set_span_in_context(span, Context())

    @property
    def recording(self) -> bool:
        """See `Span.recording`: no if the trace was not sampled."""
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """See `Span.trace_id`."""
        return format_trace_id(self._span.get_span_context().trace_id)

    def tell(self, attributes: Attributes) -> None:
        """See `Span.tell`."""
        self._span.set_attributes(dict(attributes))

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """See `Span.event`."""
        self._span.add_event(name, dict(attributes or {}))

    def fail(self, reason: str) -> None:
        """See `Span.fail`."""
        self._span.set_attribute(ERROR_TYPE, reason)
        self._span.set_status(StatusCode.ERROR, reason)

    def child(self, name: str) -> Span:
        """See `Span.child`."""
        span = self._tracer.start_span(name, context=self._context, kind=SpanKind.CLIENT)
        return OtlpSpan(self._tracer, self._propagator, span)

    def headers(self) -> Mapping[str, str]:
        """See `Span.headers`."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._context)
        return carrier

    def end(self) -> None:
        """See `Span.end`."""
        self._span.end()


class OtlpTracing:
    """Begins spans with one tracer. See `Tracing`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def server_span(self, name: str, headers: Mapping[str, str]) -> Span:
        """See `Tracing.server_span`."""
        context = self._propagator.extract(headers, Context())
        span = self._tracer.start_span(name, context=context, kind=SpanKind.SERVER)
        return OtlpSpan(self._tracer, self._propagator, span)


class ReportingExporter(SpanExporter):
    """Says in the log when spans begin to get lost, and when no longer.

    Args:
        inner: sends them.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._losing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        result = self._inner.export(spans)
        losing = result is not SpanExportResult.SUCCESS
        if losing and not self._losing:
            _log.warning("spans_not_exported", spans=len(spans))
        elif self._losing and not losing:
            _log.info("spans_exported_again")
        self._losing = losing
        return result

    def shutdown(self) -> None:
        """Send nothing more; a batch that is being sent fails."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing waits here."""
        return self._inner.force_flush(timeout_millis)


@asynccontextmanager
async def open_tracing(
    endpoint: str, *, service: str, instance: str, sample_ratio: float
) -> AsyncIterator[Tracing]:
    """Send spans while the block runs.

    At the end those that wait get two seconds.

    Args:
        endpoint: URL of a collector that takes OTLP over gRPC.
        service: name of the service.
        instance: name of this process; empty: none.
        sample_ratio: share of traces to record among those about which no caller
            has decided.
    """
    # The SDK logs every batch that fails, with addresses; the exporter says it once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter = ReportingExporter(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS))
    names = {"service.name": service}
    if instance:
        names["service.instance.id"] = instance
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create(names),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_QUEUED_SPANS))
    try:
        yield OtlpTracing(provider.get_tracer("kvloop"))
    finally:
        await _close(provider, exporter)


async def _close(provider: TracerProvider, exporter: SpanExporter) -> None:
    """Send what waits, in a thread; what takes too long is given up."""
    async with asyncio.TaskGroup() as tasks:
        flushing = tasks.create_task(asyncio.to_thread(provider.shutdown), name="flush spans")
        try:
            await asyncio.wait({flushing}, timeout=_FLUSH_SECONDS)
        finally:
            if not flushing.done():
                exporter.shutdown()  # which ends the sending, and with it the thread
