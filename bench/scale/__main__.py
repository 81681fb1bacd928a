"""Measures scale and prints tables: python -m bench.scale --help."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Annotated

import structlog
import typer
from rich.console import Console
from rich.table import Table

from bench.ledger.report import describe_machine
from bench.scale import decisions as decisions_of
from bench.scale import traffic as traffic_of
from bench.scale.workload import Workload
from bench.scale.world import Fleet, Outcome
from bench.scale.world import run as run_world
from services.router.policies import PolicyName

app = typer.Typer(add_completion=False, help="Hundreds of workers, 100,000 conversations.")
_console = Console(width=150)
_PERCENTILES = (0.5, 0.9, 0.99)


@app.callback()
def _quiet() -> None:
    level = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=level)


@app.command()
def decisions(
    workers: Annotated[list[int], typer.Option(min=2, help="Half of them run each leg.")] = [  # noqa: B006  (typer reads it)
        50,
        100,
        200,
    ],
    count: Annotated[int, typer.Option(min=1, help="Decisions per policy and size.")] = 5000,
) -> None:
    """How long the choice of both workers of a turn takes."""
    describe_machine()
    table = _table("CPU microseconds per decision", ["workers", "policy", "p50", "p90", "p99"])
    for size in workers:
        for policy in PolicyName:
            measured = asyncio.run(decisions_of.measure(policy, size, count, seed=1))
            shown = [f"{measured.quantile(share) * 1e6:.0f}" for share in _PERCENTILES]
            table.add_row(str(size), policy.value, *shown)
    _console.print(table)


@app.command()
def policies(
    turns_per_second: Annotated[
        list[float], typer.Option(min=0.1, help="Load, over all conversations.")
    ] = [60, 100],  # noqa: B006
    seconds: Annotated[float, typer.Option(min=1, help="Conversations begin during this.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="Of the first run; others follow.")] = 1,
    routers: Annotated[int, typer.Option(min=1, help="Each sees its own turns only.")] = 4,
    uneven: Annotated[
        bool, typer.Option(help="Also with slow prefill and stalled decode engines.")
    ] = True,
) -> None:
    """The policies on the same heavy-tailed conversations, in virtual time."""
    even = Fleet(routers=routers)
    fleets = {"even": even}
    if uneven:
        fleets["uneven"] = Fleet(routers=routers, slow_share=0.2, stalled=2)
    for name, fleet in fleets.items():
        for load in turns_per_second:
            title = (
                f"{name} fleet: {fleet.prefill} + {fleet.decode} workers, {routers} routers, "
                f"{load:g} turns/s"
            )
            headings = ["policy", "TTFT p50", "p90", "p99", "mean", "hit rate", "moved", "busy"]
            table = _table(title, headings)
            for policy in PolicyName:
                workload = Workload(seconds=seconds, turns_per_second=load)
                runs = [
                    asyncio.run(run_world(policy, fleet, workload, seed))
                    for seed in range(first_seed, first_seed + seeds)
                ]
                table.add_row(policy.value, *_outcome(runs))
            _console.print(table)


@app.command()
def traffic(
    workers: Annotated[list[int], typer.Option(min=5)] = [50, 100, 200],  # noqa: B006
    conversations: Annotated[list[int], typer.Option(min=1, help="Live at once.")] = [  # noqa: B006
        1_000,
        10_000,
        100_000,
    ],
) -> None:
    """Messages and bytes of the ledger and the registry."""
    describe_machine()
    headings = [
        "workers",
        "conversations",
        "messages/turn",
        "bytes/turn",
        "CPU µs/turn",
        "bytes/worker to join",
        "lease bytes/worker/min",
        "pin calls/min",
        "bytes/pin/min",
        "CPU ms/1000 pins/min",
    ]
    table = _table("kvmeta's traffic", headings)
    sizes = [(size, max(conversations)) for size in workers]
    sizes += [(max(workers), many) for many in conversations if many != max(conversations)]
    for size, many in sorted(sizes):
        one = asyncio.run(traffic_of.count(size, many))
        table.add_row(
            str(size),
            f"{many:,}",
            f"{one.turns.messages / one.turn_count:.2f}",
            f"{one.turns.bytes / one.turn_count:,.0f}",
            f"{one.turn_seconds / one.turn_count * 1e6:.0f}",
            f"{one.joining.bytes / size:,.0f}",
            f"{one.leases.bytes / size:,.0f}",
            f"{one.pins.messages // 2}",
            f"{one.pins.bytes / many:,.0f}",
            f"{one.pin_seconds / many * 1e6:.1f}",
        )
    _console.print(table)


def _outcome(runs: Sequence[Outcome]) -> list[str]:
    """Means over runs."""
    return [
        *(f"{fmean(run.quantile(share) for run in runs):.3f}" for share in _PERCENTILES),
        f"{fmean(fmean(run.ttft) for run in runs):.3f}",
        f"{fmean(run.hit_rate for run in runs):.1%}",
        f"{fmean(run.moved / max(run.followups, 1) for run in runs):.1%}",
        f"{fmean(run.prefill_use for run in runs):.0%}",
    ]


def _table(title: str, headings: Iterable[str]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    return table


if __name__ == "__main__":
    app()
