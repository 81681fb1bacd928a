"""Traces of turns: what the services say about spans, whoever records them.

A span covers one piece of work. While it runs it is the current span of its task
(and of tasks started meanwhile), so that calls to other services can carry its
context without every signature naming it. Where nothing is traced the current
span is `NO_SPAN`, and everything here returns at once.

Attributes are names, numbers and reasons. Prompts, answers, error texts (engines
quote prompts in them), tenants and conversation ids never become attributes: ids of
callers may name people, and those that kvloop derives are digests of what was said.
The turn id, which is random, leads to the logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Protocol

import grpc

from kvloop.errors import KvloopError

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
"""Of a caller that traces nothing."""

ERROR_TYPE = "error.type"
CANCELLED = "kvloop.cancelled"

_CARRIED = ("traceparent", "tracestate")
_FAULTS_OF_CALLERS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
"""Answers to a caller that do not make its span a failed one."""


class Span(Protocol):
    """One piece of work in a trace."""

    @property
    def recording(self) -> bool:
        """Whether anybody will see what is told; if not, spare the effort."""

    @property
    def trace_id(self) -> str:
        """Id of the trace, 32 hexadecimal digits; empty if nothing is traced."""

    def tell(self, attributes: Attributes) -> None:
        """Set attributes; later values replace earlier ones."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Note that something happened now."""

    def fail(self, reason: str) -> None:
        """Mark the work as failed.

        Args:
            reason: a KvloopError's reason or the name of a class, never a text.
        """

    def child(self, name: str) -> Span:
        """A span for a call to another service, started now."""

    def headers(self) -> Mapping[str, str]:
        """What a call made within this span carries: W3C traceparent, tracestate."""

    def end(self) -> None:
        """The work is over."""


class NoSpan:
    """A span that nobody records. See `Span`."""

    recording = False
    trace_id = ""

    def tell(self, attributes: Attributes) -> None:
        """See `Span.tell`."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """See `Span.event`."""

    def fail(self, reason: str) -> None:
        """See `Span.fail`."""

    def child(self, name: str) -> Span:
        """See `Span.child`."""
        return self

    def headers(self) -> Mapping[str, str]:
        """See `Span.headers`."""
        return NO_HEADERS

    def end(self) -> None:
        """See `Span.end`."""


class Tracing(Protocol):
    """Where a service's spans begin."""

    def server_span(self, name: str, headers: Mapping[str, str]) -> Span:
        """A span for a call that came from outside, started now.

        Args:
            name: what is done.
            headers: of the call, as `carried` gives them. What is malformed in them
                begins a new trace.
        """


class NoTracing:
    """Records nothing. See `Tracing`."""

    def server_span(self, name: str, headers: Mapping[str, str]) -> Span:
        """See `Tracing.server_span`."""
        return NO_SPAN


NO_SPAN: Span = NoSpan()
"""The current span where nothing is traced."""

_current: ContextVar[Span] = ContextVar("kvloop_span", default=NO_SPAN)


def current() -> Span:
    """The span whose work this is."""
    return _current.get()


@contextmanager
def child_span(name: str) -> Iterator[Span]:
    """A child of the current span while the block runs."""
    outer = _current.get()
    if outer is NO_SPAN:
        yield outer
        return
    with running(outer.child(name)) as span:
        yield span


@contextmanager
def running(span: Span) -> Iterator[Span]:
    """Make a span the current one while the block runs, then end it.

    An error that leaves the block is recorded by its reason. The span before it
    comes back by value, not by a token: a generator may be closed in another
    context than the one that started it.
    """
    if span is NO_SPAN:
        yield span
        return
    outer = _current.get()
    _current.set(span)
    try:
        yield span
    except (asyncio.CancelledError, GeneratorExit):
        span.tell({CANCELLED: True})
        raise
    except KvloopError as error:
        if error.code in _FAULTS_OF_CALLERS:
            span.tell({ERROR_TYPE: error.reason})
        else:
            span.fail(error.reason)
        raise
    except Exception as error:
        span.fail(type(error).__name__)
        raise
    finally:
        _current.set(outer)
        span.end()


def carried(headers: Iterable[tuple[str, str | bytes]]) -> Mapping[str, str]:
    """The part of a call's headers or metadata that belongs to traces.

    Args:
        headers: names in lower case; one that comes twice is joined by a comma, as
            the W3C has it for tracestate.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        if name in _CARRIED and isinstance(value, str):
            found[name] = f"{found[name]},{value}" if name in found else value
    return found or NO_HEADERS


def metadata() -> tuple[tuple[str, str], ...] | None:
    """Metadata for a gRPC call made now; None if there is nothing to carry."""
    span = _current.get()
    return None if span is NO_SPAN else tuple(span.headers().items())
