"""Spans for the calls that a gRPC server answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from kvloop.common.v1 import common_pb2
from services.common.rpc_handlers import Around, AroundMethod, Context
from services.common.tracing import NO_HEADERS, NoTracing, Tracing, carried, current, running


def spans(tracing: Tracing, names: Mapping[str, str]) -> Sequence[AroundMethod]:
    """A span for each call of some methods, within the caller's trace.

    It stands inside of what turns errors into a status, so that it sees their
    reasons. Where nothing is traced there is nothing to run.

    Args:
        tracing: where spans begin.
        names: of spans, by the method's name without its service. Other methods get
            none, above all streams that run as long as their client.
    """
    if isinstance(tracing, NoTracing):
        return []

    def of_method(method: str) -> Around | None:
        name = names.get(method.rpartition("/")[2])
        if name is None:
            return None

        @asynccontextmanager
        async def around(context: Context, request: object) -> AsyncIterator[None]:
            headers = told_context(request) or carried(context.invocation_metadata() or ())
            with running(tracing.server_span(name, headers)):
                yield

        return around

    return [of_method]


def trace_context() -> common_pb2.TraceContext | None:
    """What a request carries that is sent now; None where nothing is traced."""
    headers = current().headers()
    return common_pb2.TraceContext(**headers) if headers else None


def told_context(request: object) -> Mapping[str, str]:
    """The trace context that stands in a request, as headers."""
    said = getattr(request, "trace_context", None)
    if not isinstance(said, common_pb2.TraceContext):
        return NO_HEADERS
    return {field.name: value for field, value in said.ListFields()}
