"""An OpenTelemetry collector that keeps what it gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

SERVER = trace_pb2.Span.SPAN_KIND_SERVER
CLIENT = trace_pb2.Span.SPAN_KIND_CLIENT
ERROR = trace_pb2.Status.STATUS_CODE_ERROR
UNSET = trace_pb2.Status.STATUS_CODE_UNSET


@dataclass(frozen=True)
class Received:
    """A span as the collector got it."""

    service: str
    span: trace_pb2.Span

    @property
    def trace_id(self) -> str:
        """As in a traceparent."""
        return self.span.trace_id.hex()

    @property
    def span_id(self) -> str:
        """As in a traceparent."""
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        """Empty for the root of a trace."""
        return self.span.parent_span_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        """Names and values."""
        return {pair.key: _value(pair.value) for pair in self.span.attributes}

    @property
    def events(self) -> list[str]:
        """Names of the events, in order."""
        return [event.name for event in self.span.events]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes OTLP over gRPC."""

    url: str = ""
    spans: list[Received] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    """Every request as it came."""

    async def Export(self, request: Any, context: Any) -> Any:
        """Keep the spans of one request."""
        self.raw.append(request.SerializeToString())
        for group in request.resource_spans:
            names = {pair.key: _value(pair.value) for pair in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans += [Received(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def one(self, service: str, name: str) -> Received:
        """The only span of that name."""
        (found,) = [s for s in self.spans if (s.service, s.span.name) == (service, name)]
        return found

    def tree(self) -> set[tuple[str, str, str]]:
        """Service and name of each span, with the name of its parent."""
        names = {span.span_id: span.span.name for span in self.spans}
        return {(s.service, s.span.name, names.get(s.parent_id, "")) for s in self.spans}


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """A collector on a free port."""
    server = grpc.aio.server()
    found = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    found.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield found
    finally:
        await server.stop(None)


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None
