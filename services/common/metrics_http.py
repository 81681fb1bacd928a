"""Serves a process's metrics to Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from services.common.addresses import split_host_port
from services.common.loop_metrics import watch_tasks


def add_process(registry: CollectorRegistry) -> None:
    """Add this process: memory, CPU time, open files (process_*), tasks of the running loop."""
    ProcessCollector(registry=registry)
    loop = asyncio.get_running_loop()
    watch_tasks(registry, lambda: len(asyncio.all_tasks(loop)))


@contextmanager
def expose(registry: CollectorRegistry, address: str) -> Iterator[int]:
    """Serve a process's metrics and its own figures; see `add_process` and `serve`."""
    add_process(registry)
    with serve(registry, address) as port:
        yield port


@contextmanager
def serve(registry: CollectorRegistry, address: str) -> Iterator[int]:
    """Serve metrics over HTTP, from a thread of its own, while the block runs.

    Args:
        registry: what to serve.
        address: host:port to listen on; port 0 takes a free one.

    Yields:
        The port.

    Raises:
        OSError: the address cannot be bound.
    """
    host, port = split_host_port(address)
    server, thread = start_http_server(port, addr=host, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
