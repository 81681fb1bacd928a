"""The stores to compare, each served by a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from tests.contract.postgres_server import private_server

Kind = Literal["memory", "sqlite", "postgres"]


@dataclass(frozen=True)
class Server:
    """A ledger that serves."""

    kind: Kind
    port: int
    metrics_port: int


@contextmanager
def database(kind: Kind) -> Iterator[str]:
    """The URL of an empty database that is removed afterwards.

    Raises:
        SystemExit: PostgreSQL is not installed.
    """
    with ExitStack() as stack:
        if kind == "memory":
            yield "memory:"
        elif kind == "sqlite":
            directory = stack.enter_context(TemporaryDirectory(prefix="kvloop-bench-"))
            yield f"sqlite:///{Path(directory) / 'ledger.db'}"
        else:
            server = stack.enter_context(private_server(durable=True))
            if server is None:
                raise SystemExit("PostgreSQL is not installed; leave it out with --stores")
            yield server.url


@contextmanager
def serve(
    kind: Kind, url: str, *, rows: int, params_bytes: int, due_rows: int = 0, due_in: float = 0
) -> Iterator[Server]:
    """A ledger with that many conversations, in a process of its own."""
    arguments = [url, str(rows), str(params_bytes), str(due_rows), str(due_in)]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.ledger.server", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        port, metrics_port = process.stdout.readline().split()
        yield Server(kind, int(port), int(metrics_port))
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
