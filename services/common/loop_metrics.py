"""What the event loop of a process has to look after."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge


def watch_tasks(registry: CollectorRegistry, count: Callable[[], int]) -> None:
    """Show how many tasks there are: more and more of them at the same load is a leak.

    Args:
        registry: where Prometheus finds it.
        count: says how many, when Prometheus asks; from any thread.
    """
    gauge = Gauge(
        "kvloop_loop_tasks",
        "Tasks of this process's event loop that have not ended.",
        registry=registry,
    )
    gauge.set_function(count)
