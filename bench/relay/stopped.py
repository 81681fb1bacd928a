"""What clients cost that stop reading: python -m bench.relay.stopped.

Each asks for an answer of 200 MB, reads its first bytes and no more. Memory of
every process on the way is looked at before, and when the engine has stopped writing.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.relay.processes import Fleet, cpu_seconds, fleet, resident_mib
from bench.relay.prompts import small

app = typer.Typer(add_completion=False)
_console = Console()
_TOKENS = 900_000
_ON_THE_WAY = ("decode engine", "decode sidecar", "router")
_ANSWERED = b"HTTP/1.1 200"
_LOOK_SECONDS = 1.0


@app.command()
def measure(clients: Annotated[int, typer.Option(min=1, help="that stop reading")] = 64) -> None:
    """Show how much memory clients take that stop reading."""
    before, after = uvloop.run(_measure(clients))
    table = Table(title=f"{clients} clients that stopped reading")
    for heading in ("process", "MiB before", "MiB then", "KiB per client"):
        table.add_column(heading, justify="right")
    for name in _ON_THE_WAY:
        grown = (after[name] - before[name]) * 1024 / clients
        table.add_row(name, f"{before[name]:.1f}", f"{after[name]:.1f}", f"{grown:.0f}")
    _console.print(table)


async def _measure(clients: int) -> tuple[dict[str, float], dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="stopped-") as name:
        async with fleet(Path(name), Path(name)) as running:
            before = _memory(running)
            stopped = [await _stopped(running.gateway_port, f"stopped-{i}") for i in range(clients)]
            await _until_idle(running.pids["decode engine"])
            after = _memory(running)
            for connection in stopped:
                connection.close()
    return before, after


async def _stopped(port: int, conversation: str) -> socket.socket:
    """A client that has read the first bytes of its answer and reads no more."""
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    await loop.sock_connect(connection, ("127.0.0.1", port))
    prompt = small(_TOKENS).of(conversation)
    body = prompt.body()
    head = f"POST {prompt.path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(connection, head.encode() + body)
    status = await loop.sock_recv(connection, len(_ANSWERED))
    if status != _ANSWERED:
        raise RuntimeError(f"the router answered {status!r}")
    return connection


async def _until_idle(pid: int) -> None:
    """Wait until a process does nothing more."""
    while True:
        before = cpu_seconds(pid)
        await asyncio.sleep(_LOOK_SECONDS)
        if cpu_seconds(pid) - before < 0.01 * _LOOK_SECONDS:
            return


def _memory(running: Fleet) -> dict[str, float]:
    return {name: resident_mib(running.pids[name]) for name in _ON_THE_WAY}


if __name__ == "__main__":
    app()
