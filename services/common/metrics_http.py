"""Serves a process's metrics to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from services.common.addresses import split_host_port


@contextmanager
def expose(registry: CollectorRegistry, address: str) -> Iterator[int]:
    """Serve the metrics over HTTP, from a thread of its own, while the block runs.

    Memory, CPU time and open files of the process (process_*) are added to them.

    Args:
        registry: what to serve.
        address: host:port to listen on; port 0 takes a free one.

    Yields:
        The port.

    Raises:
        OSError: the address cannot be bound.
    """
    host, port = split_host_port(address)
    ProcessCollector(registry=registry)
    server, thread = start_http_server(port, addr=host, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
