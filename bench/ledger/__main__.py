"""Measures the ledger through gRPC and prints tables."""

from __future__ import annotations

import asyncio
import os
import platform
import sqlite3
import statistics
import urllib.request
from contextlib import ExitStack
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.ledger import load
from bench.ledger.load import Measured
from bench.ledger.stores import Kind, Server, database, serve

app = typer.Typer(add_completion=False, help="How fast the ledger is, through gRPC.")
_console = Console()

Stores = Annotated[list[str], typer.Option(help="memory, sqlite, postgres")]
Concurrency = Annotated[int, typer.Option(min=1, help="turns at once")]
ParamsBytes = Annotated[int, typer.Option(min=1, help="transfer params of each turn")]
KINDS: tuple[Kind, ...] = ("memory", "sqlite", "postgres")


@app.command()
def pairs(
    stores: Stores = list(KINDS),  # noqa: B006  (typer reads it)
    rows: Annotated[list[int], typer.Option(min=1, help="conversations")] = [1_000],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="length of a round")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="rounds per store")] = 5,
    concurrency: Concurrency = 32,
    params_bytes: ParamsBytes = 1_000,
) -> None:
    """Take and commit, in rounds that go from store to store."""
    _describe_machine()
    table = Table(title=f"take + commit, {concurrency} turns at once, {params_bytes} B of params")
    for heading in ("rows", "store", "pairs/s (spread)", "of memory", "take ms", "commit ms"):
        table.add_column(heading, justify="right")
    table.caption = "ms: 50th / 95th / 99th percentile"
    for count in rows:
        with ExitStack() as stack:
            servers = [
                stack.enter_context(
                    serve(
                        kind,
                        stack.enter_context(database(kind)),
                        rows=count,
                        params_bytes=params_bytes,
                    )
                )
                for kind in _kinds(stores)
            ]
            measured = asyncio.run(
                _measure(servers, count, seconds, rounds, concurrency, b"p" * params_bytes)
            )
        medians = {kind: _median(each) for kind, each in measured.items()}
        for kind, each in measured.items():
            rates = [one.pairs_per_second for one in each]
            of_memory = medians[kind] / medians["memory"] if "memory" in medians else None
            table.add_row(
                f"{count:,}",
                kind,
                f"{medians[kind]:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
                "" if of_memory is None else f"{of_memory:.2f}",
                _percentiles([second for one in each for second in one.take]),
                _percentiles([second for one in each for second in one.commit]),
            )
    _console.print(table)


@app.command()
def sweep(
    stores: Stores = ["sqlite", "postgres"],  # noqa: B006
    due: Annotated[int, typer.Option(min=1, help="rows that are due at once")] = 100_000,
    after: Annotated[float, typer.Option(help="seconds from start until they are due")] = 20,
    concurrency: Concurrency = 8,
    params_bytes: ParamsBytes = 1_000,
) -> None:
    """Takes while a great many rows expire at once."""
    _describe_machine()
    for kind in _kinds(stores):
        with (
            database(kind) as url,
            serve(
                kind,
                url,
                rows=due + _LIVE_ROWS,
                params_bytes=params_bytes,
                due_rows=due,
                due_in=after,
            ) as server,
        ):
            asyncio.run(_watch_sweep(server, due, concurrency, b"p" * params_bytes))


_LIVE_ROWS = 1_000


async def _measure(
    servers: list[Server], rows: int, seconds: float, rounds: int, concurrency: int, params: bytes
) -> dict[Kind, list[Measured]]:
    measured: dict[Kind, list[Measured]] = {server.kind: [] for server in servers}
    for seed in range(rounds + 1):
        for server in servers:
            one = await load.run(
                server.port,
                conversations=rows,
                params=params,
                concurrency=min(concurrency, rows),
                seconds=seconds,
                seed=seed,
            )
            if seed > 0:  # the first round warms up
                measured[server.kind].append(one)
    return measured


async def _watch_sweep(server: Server, due: int, concurrency: int, params: bytes) -> None:
    table = Table(title=f"{server.kind}: takes while {due:,} rows expire")
    for heading in ("expired so far", "takes/s", "take ms"):
        table.add_column(heading, justify="right")
    before: list[float] = []
    during: list[float] = []
    seed = expired = 0
    while expired < due:
        seed += 1
        one = await load.run(
            server.port,
            conversations=_LIVE_ROWS,
            params=params,
            concurrency=concurrency,
            seconds=1,
            seed=seed,
        )
        expired = await asyncio.to_thread(_expired, server)
        if expired > 0:
            rate = len(one.take) / one.elapsed
            table.add_row(f"{expired:,}", f"{rate:,.0f}", _percentiles(one.take))
            during.extend(one.take)
        elif seed > 1:  # the first second warms up
            before.extend(one.take)
    _console.print(table)
    if before and during:
        _console.print(f"takes before the sweep, in ms: {_percentiles(before)}")
        ratio = _percentile(during, 99) / _percentile(before, 99)
        _console.print(f"p99 of takes during the sweep: {ratio:.1f} times its value before it")


def _expired(server: Server) -> int:
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    with urllib.request.urlopen(url) as page:
        for line in page.read().decode().splitlines():
            if line.startswith('kvloop_kvmeta_swept_rows_total{outcome="expired"}'):
                return int(float(line.split()[-1]))
    return 0


def _kinds(names: list[str]) -> list[Kind]:
    unknown = set(names) - set(KINDS)
    if unknown:
        raise typer.BadParameter(f"no such store: {', '.join(sorted(unknown))}")
    return [kind for kind in KINDS if kind in names]


def _median(rounds: list[Measured]) -> float:
    return statistics.median(one.pairs_per_second for one in rounds)


def _percentiles(seconds: list[float]) -> str:
    return " / ".join(f"{_percentile(seconds, of) * 1000:.1f}" for of in (50, 95, 99))


def _percentile(values: list[float], of: int) -> float:
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100)[of - 1]


def _describe_machine() -> None:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in open("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    _console.print(
        f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    )


if __name__ == "__main__":
    app()
