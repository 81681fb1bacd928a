"""Takes the services' spans of turns, as an OpenTelemetry collector does, and keeps their times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import import_module

import grpc

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_EXPORT_MILLISECONDS = 2000
"""How long services collect spans: sending them is work, and shall not meet many turns."""
_TURN_SPANS = frozenset({"turn", "prefill_leg", "prefill", "decode_leg", "decode"})
"""Those without which a turn's trace is not whole."""


@dataclass(frozen=True, slots=True)
class SpanTimes:
    """When one piece of work of a turn began and ended.

    Attributes:
        trace_id: of the turn, 32 hexadecimal digits.
        service: that did it, such as "kvloop-router".
        name: what it was.
        start_ns: wall-clock time, like all others; one host has one clock.
        end_ns: end of it.
        events: time of each event in it.
    """

    trace_id: str
    service: str
    name: str
    start_ns: int
    end_ns: int
    events: Mapping[str, int]


class SpanSink:
    """Keeps what services send. Requests are read when they are asked for, not as they
    come, so that a turn that runs meanwhile is hardly disturbed.

    Attributes:
        url: where services send their spans.
    """

    def __init__(self) -> None:
        self.url = ""
        self._unread: list[bytes] = []
        self._came = asyncio.Event()
        self._spans: dict[str, list[SpanTimes]] = {}

    async def export(self, request: bytes, context: object) -> bytes:
        """One request of a service; the empty reply says that all was taken."""
        self._unread.append(request)
        self._came.set()
        return b""

    def of(self, trace_id: str) -> list[SpanTimes]:
        """The spans of one trace that have come so far."""
        for request in self._unread:
            for span in _read(request):
                self._spans.setdefault(span.trace_id, []).append(span)
        self._unread.clear()
        return self._spans.get(trace_id, [])

    async def until_whole(self, trace_ids: Collection[str], *, at_most_seconds: float) -> None:
        """Wait until the spans of all these turns have come, or the time is up."""
        try:
            async with asyncio.timeout(at_most_seconds):
                while not all(self._whole(trace_id) for trace_id in trace_ids):
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return  # a turn that lacks spans is left out of what is told

    def _whole(self, trace_id: str) -> bool:
        return {span.name for span in self.of(trace_id)} >= _TURN_SPANS


def tracing_is_installed() -> bool:
    """Whether services of this Python can send spans: they refuse to start otherwise."""
    try:
        import_module("services.common.otlp")
        import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    except ImportError:
        return False
    return True


def tracing_environment(url: str) -> dict[str, str]:
    """Environment of services that send spans of those turns alone whose client asks for it."""
    made = {"OTEL_BSP_SCHEDULE_DELAY": str(_EXPORT_MILLISECONDS)}
    for service in ("ROUTER", "KVMETA", "WORKER"):
        made[f"KVLOOP_{service}_OTLP_ENDPOINT"] = url
        made[f"KVLOOP_{service}_TRACE_SAMPLE_RATIO"] = "0"
    return made


@asynccontextmanager
async def span_sink() -> AsyncIterator[SpanSink]:
    """A collector on a free port of this host."""
    sink = SpanSink()
    server = grpc.aio.server()
    service, _, method = _METHOD.strip("/").partition("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(sink.export)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    sink.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield sink
    finally:
        await server.stop(None)


@contextmanager
def traced_call(trace_id: str) -> Iterator[None]:
    """Have the client's calls in the block ask for a trace with this id."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

    span_id = int(trace_id[:16], 16) or 1
    flags = TraceFlags(TraceFlags.SAMPLED)
    context = SpanContext(int(trace_id, 16), span_id, is_remote=False, trace_flags=flags)
    with use_span(NonRecordingSpan(context)):
        yield


def _read(request: bytes) -> Iterator[SpanTimes]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for group in ExportTraceServiceRequest.FromString(request).resource_spans:
        names = {pair.key: pair.value.string_value for pair in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                yield SpanTimes(
                    trace_id=span.trace_id.hex(),
                    service=names.get("service.name", ""),
                    name=span.name,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    events={event.name: event.time_unix_nano for event in span.events},
                )
