"""Imports gRPC so that the thread which waits for calls waits for the sockets too.

By default another thread reads the sockets and wakes it: twice the context switches
for each message. See docs/adr/0062. gRPC's core reads the choice while it is imported,
so processes that serve gRPC import this module before any other that imports gRPC. It
stands in the environment no longer than that: engines that a sidecar starts may have a
gRPC of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

VARIABLE = "GRPC_EXPERIMENTS"
"""Where gRPC's core looks. What an operator has set there holds; an empty text means
gRPC's own choice."""
CHOICE = "-event_engine_client,-event_engine_listener"


@contextmanager
def chosen(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Have the choice in an environment while the block runs, unless another is there."""
    if VARIABLE in environ:
        yield
        return
    environ[VARIABLE] = CHOICE
    try:
        yield
    finally:
        del environ[VARIABLE]


with chosen(os.environ):
    import grpc  # noqa: F401
