"""Turns join the caller's trace if the caller uses OpenTelemetry."""

from __future__ import annotations

import sys


def trace_context() -> tuple[tuple[str, str], ...]:
    """W3C context of OpenTelemetry's current span, as call metadata; empty without one.

    A process that has not loaded OpenTelemetry has no span, and does not load it here.
    """
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
