"""Measures the relay and prints a table: python -m bench.relay --help."""

from __future__ import annotations

import json
import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from bench.relay.cases import WAYS, Round, Runner, all_cases
from bench.relay.processes import fleet
from bench.relay.report import records, table

app = typer.Typer(add_completion=False)
_console = Console(width=200)


@app.command()
def measure(
    case: Annotated[list[str], typer.Option(help="cases; all if none is named")] = [],  # noqa: B006
    way: Annotated[list[str], typer.Option(help="ways: " + ", ".join(WAYS))] = list(WAYS),  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="rounds of each case and way")] = 5,
    out: Annotated[Path | None, typer.Option(help="folder for relay.json and logs")] = None,
) -> None:
    """Measure what kvloop's relay adds, beside engines alone and a FastAPI relay."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    done = uvloop.run(_measure(case or list(all_cases()), way, rounds, out))
    found = records(done)
    _console.print(table(found))
    if out is not None:
        document = {"records": found, "rounds": [asdict(each) for each in done]}
        (out / "relay.json").write_text(json.dumps(document))


async def _measure(names: list[str], ways: list[str], rounds: int, out: Path | None) -> list[Round]:
    known = all_cases()
    source = random.Random(time.time_ns())
    done: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        async with fleet(out or Path(folder), Path(folder)) as running:
            runner = Runner(running, time.perf_counter, source)
            for name in names:
                for _ in range(rounds):
                    shuffled = source.sample(ways, len(ways))
                    done += [await runner.round(known[name], way) for way in shuffled]
                _console.print(f"{name}: {rounds} rounds")
    return done


if __name__ == "__main__":
    app()
