"""The stores to compare, each served by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from tests.contract.postgres_server import private_server

Kind = Literal["memory", "sqlite", "postgres"]


@dataclass(frozen=True)
class Contents:
    """What a ledger holds before the measurement."""

    rows: int
    params_bytes: int
    due_rows: int = 0
    due_in_seconds: float = 0


@dataclass(frozen=True)
class Server:
    """A ledger that serves."""

    kind: Kind
    rows: int
    port: int
    metrics_port: int


@contextmanager
def serve(
    kind: Kind, contents: Contents, filled: Callable[[int], None] = lambda _rows: None
) -> Iterator[Server]:
    """A ledger of its own database, in a process of its own.

    Args:
        kind: the store.
        contents: what it is filled with first.
        filled: is told from time to time how many rows there are.

    Raises:
        SystemExit: PostgreSQL is not installed.
    """
    with _database(kind) as url:
        values = (
            contents.rows,
            contents.params_bytes,
            contents.due_rows,
            contents.due_in_seconds,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.ledger.server", url, *map(str, values)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = json.loads(line)
                if "port" in event:
                    yield Server(kind, contents.rows, event["port"], event["metrics_port"])
                    return
                filled(event["filled"])
            raise SystemExit(f"the {kind} ledger did not start")
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


@contextmanager
def _database(kind: Kind) -> Iterator[str]:
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
