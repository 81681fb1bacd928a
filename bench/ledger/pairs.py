"""Take and commit, in short rounds that go from server to server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from random import Random

from rich.progress import Progress, TaskID
from rich.table import Table

from bench.ledger import load
from bench.ledger.load import Measured
from bench.ledger.report import console, milliseconds, percentile, spread
from bench.ledger.stores import Contents, Kind, Server, serve


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    kinds: Sequence[Kind]
    rows: Sequence[int]
    seconds: float
    """Length of a round."""
    rounds: int
    """Rounds per server, one to warm up not counted."""
    concurrency: int
    """Turns at once."""
    params_bytes: int


Rounds = list[Measured]


def run(plan: Plan) -> None:
    """Fill all ledgers, measure them in turn, and print a table.

    What disturbs the machine disturbs all of them alike, and ratios are those of
    neighbouring rounds.
    """
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        servers = []
        for rows in plan.rows:
            for kind in plan.kinds:
                bar = progress.add_task(f"fill {kind}, {rows:,} rows", total=rows)
                told = partial(_show, progress, bar)
                contents = Contents(rows, plan.params_bytes)
                servers.append(stack.enter_context(serve(kind, contents, told)))
                told(rows)
        measuring = progress.add_task("measure", total=(plan.rounds + 1) * len(servers))
        measured = asyncio.run(_measure(plan, servers, lambda: progress.advance(measuring)))
    console.print(_table(plan, measured))


def _show(progress: Progress, bar: TaskID, done: int) -> None:
    progress.update(bar, completed=done)


async def _measure(
    plan: Plan, servers: Sequence[Server], advance: Callable[[], None]
) -> dict[Server, Rounds]:
    measured: dict[Server, Rounds] = {server: [] for server in servers}
    for seed in range(plan.rounds + 1):
        for server in Random(seed).sample(servers, len(servers)):
            one = await load.run(
                server.port,
                conversations=server.rows,
                params=b"p" * plan.params_bytes,
                concurrency=min(plan.concurrency, server.rows),
                seconds=plan.seconds,
                seed=seed,
            )
            advance()
            if seed > 0:  # the first round warms up
                measured[server].append(one)
    return measured


def _table(plan: Plan, measured: Mapping[Server, Rounds]) -> Table:
    table = Table(
        title=f"take + commit, {plan.concurrency} turns at once, {plan.params_bytes:,} B of "
        f"params, {plan.rounds} rounds of {plan.seconds:g} s"
    )
    for heading in ("rows", "store", "pairs/s", "of memory", "take ms", "commit ms", "latency"):
        table.add_column(heading, justify="right")
    table.caption = (
        "ms: 50th / 95th / 99th percentile. of memory: rate, to that of memory with as many rows. "
        f"latency: median of a pair, to that of the same store with {plan.rows[0]:,} rows. "
        "Medians of rounds (least to most)."
    )
    by_place = {(server.kind, server.rows): rounds for server, rounds in measured.items()}
    for (kind, rows), rounds in by_place.items():
        table.add_row(
            f"{rows:,}",
            kind,
            spread([one.pairs_per_second for one in rounds], 0),
            _ratio(_rate, rounds, by_place.get(("memory", rows))),
            milliseconds([second for one in rounds for second in one.take]),
            milliseconds([second for one in rounds for second in one.commit]),
            _ratio(_median_latency, rounds, by_place[(kind, plan.rows[0])]),
        )
    return table


def _ratio(value: Callable[[Measured], float], rounds: Rounds, base: Rounds | None) -> str:
    """Round by round, or nothing where there is nothing to compare with."""
    if base is None or base is rounds:
        return ""
    return spread([value(one) / value(other) for one, other in zip(rounds, base, strict=True)], 2)


def _rate(one: Measured) -> float:
    return one.pairs_per_second


def _median_latency(one: Measured) -> float:
    return percentile(one.take, 50) + percentile(one.commit, 50)
