"""Compares ways to retain KV and prints a table: python -m bench.retention --help."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.retention.arms import ARMS
from bench.retention.charts import write_chart
from bench.retention.runs import Row, rows, run_all, write_csv
from bench.retention.workload import Workload

app = typer.Typer(add_completion=False)
_console = Console(width=120)
_DEFAULT = Workload()


@app.command()
def compare(
    hours: Annotated[float, typer.Option(help="Virtual time.")] = _DEFAULT.hours,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 5,
    median_gap: Annotated[
        float, typer.Option(help="Seconds between turns, median.")
    ] = _DEFAULT.median_gap_seconds,
    gap_sigma: Annotated[float, typer.Option(help="Of the gap's logarithm.")] = _DEFAULT.gap_sigma,
    mean_turns: Annotated[float, typer.Option(help="Of a conversation.")] = _DEFAULT.mean_turns,
    abandoned: Annotated[
        float, typer.Option(help="Share of conversations that break off.")
    ] = _DEFAULT.abandoned,
    ends_said: Annotated[
        list[float], typer.Option(help="Shares of the others whose end is said.")
    ] = [1.0, 0.5, 0.0],  # noqa: B006  (typer reads it)
    blocks: Annotated[int, typer.Option(help="KV blocks of the decode engine.")] = 200_000,
    out: Annotated[Path | None, typer.Option(help="Folder for CSV, JSON and chart.")] = None,
) -> None:
    """A fixed TTL of 480 s against leases, on the same conversations, in virtual time."""
    workload = Workload(
        hours=hours,
        median_gap_seconds=median_gap,
        gap_sigma=gap_sigma,
        mean_turns=mean_turns,
        abandoned=abandoned,
    )
    runs = []
    for run in run_all(workload, ends_said, range(1, seeds + 1), blocks):
        runs.append(run)
        _console.print(f"said {run.ends_said:.0%}, seed {run.seed}, {run.arm}", style="dim")
    found = rows(runs)
    for arm in ARMS:
        _console.print(f"{arm.name}: {arm.what}")
    _console.print(_table(found, workload, seeds))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / "retention.csv", runs)
        document = {"workload": asdict(workload), "rows": [asdict(row) for row in found]}
        (out / "retention.json").write_text(json.dumps(document))
        write_chart(out / "retention.svg", runs)


def _table(found: list[Row], workload: Workload, seeds: int) -> Table:
    table = Table(
        title=f"{seeds} seeds of {workload.hours:g} h; gaps of {workload.median_gap_seconds:g} s "
        f"(median, sigma {workload.gap_sigma:g}); {workload.abandoned:.0%} abandoned"
    )
    for heading in (
        "end said",
        "way",
        "fewer block-seconds (spread)",
        "hit rate",
        "points lost (most)",
        "peak",
    ):
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(
            f"{row.ends_said:.0%}",
            row.arm,
            f"{row.fewer:.2f}x ({row.fewer_least:.2f} to {row.fewer_most:.2f})",
            f"{row.hit_rate:.2%}",
            f"{row.points_lost:.2f} ({row.points_lost_most:.2f})",
            f"{row.peak_share:.0%}",
        )
    return table


if __name__ == "__main__":
    app()
