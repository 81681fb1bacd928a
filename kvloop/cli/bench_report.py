"""Shows and writes what `kvloop bench ttft` has found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from kvloop.bench.cells import Cell
from kvloop.bench.charts import write_charts
from kvloop.bench.files import write_csv, write_json
from kvloop.bench.outputs import check_outputs
from kvloop.bench.tables import output_lines, slowdown_lines, ttft_table
from kvloop.cli.bench_run import Measured
from kvloop.errors import UnsupportedError


def report(measured: Measured, found: list[Cell], console: Console) -> None:
    """Print what was found."""
    run = measured.run
    console.print(ttft_table(found))
    for line in output_lines(check_outputs(run)):
        console.print(line, highlight=False)
    if measured.slowdown is not None:
        for line in slowdown_lines(measured.slowdown):
            console.print(line, highlight=False)
    late = max((sample.late_seconds for sample in run.samples), default=0.0)
    if late >= 1:
        console.print(
            f"a turn began {late:.0f} s later than planned: this machine is too slow a client",
            highlight=False,
        )
    error = next((sample.error for sample in run.samples if sample.error), None)
    if error:
        console.print(f"some turns failed, for example: {error}", markup=False, highlight=False)


def write(
    folder: Path,
    measured: Measured,
    found: list[Cell],
    conditions: Mapping[str, Any],
    charts: str,
    console: Console,
) -> list[Path]:
    """Write JSON, CSV and charts; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "ttft.json", folder / "ttft.csv"]
    checks = check_outputs(measured.run)
    write_json(paths[0], measured.run, found, checks, conditions, measured.slowdown)
    write_csv(paths[1], found)
    if charts == "none":
        return paths
    try:
        return [*paths, *write_charts(folder, found, charts)]
    except UnsupportedError as error:
        console.print(error.message, highlight=False)
        return paths
