"""Runs kvloop under load, or under attack: python -m bench.soak --help."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.status import Status

from bench.soak.chaos import Attack, Crowd
from bench.soak.report import Report, document, show
from bench.soak.runs import Surroundings, run_chaos, run_streams
from bench.soak.stack import Shape
from bench.soak.streams import Load
from bench.soak.talks import Lengths

app = typer.Typer(add_completion=False)
_console = Console(width=150)

Seed = Annotated[int | None, typer.Option(help="Decides what is left to chance; else drawn.")]
Out = Annotated[Path | None, typer.Option(help="Folder for soak.json and logs of processes.")]
Workers = Annotated[int, typer.Option(min=1, help="Prefill workers, and as many for decode.")]


@app.command()
def streams(
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 1000,
    seconds: Annotated[float, typer.Option(help="How long turns are begun.")] = 300.0,
    fault_share: Annotated[float, typer.Option(help="Turns that meet a fault.")] = 0.02,
    inter_token_seconds: Annotated[float, typer.Option(help="Between two tokens.")] = 1.0,
    answer: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.")] = 6,
    ttl_seconds: Annotated[float, typer.Option(help="How long decode keeps a turn.")] = 40.0,
    workers: Workers = 2,
    seed: Seed = None,
    out: Out = None,
) -> None:
    """Many streams through one router while single turns meet faults.

    The defaults ask for some 950 tokens and 30 turns a second.
    """
    load = Load(
        streams=streams,
        seconds=seconds,
        ramp_seconds=min(answer * inter_token_seconds, seconds / 4),
        pause_seconds=1.0,
        turn_seconds=60.0 + 4 * answer * inter_token_seconds,
        lengths=Lengths((60, 160), answer, turns),
    )
    shape = Shape(workers=workers, inter_token_seconds=inter_token_seconds, ttl_seconds=ttl_seconds)
    _run(seed, out, lambda around: run_streams(load, fault_share, shape, around))


@app.command()
def chaos(
    conversations: Annotated[int, typer.Option(min=1, help="Conversations at once.")] = 200,
    seconds: Annotated[float, typer.Option(help="How long turns are begun.")] = 600.0,
    kill_every: Annotated[float, typer.Option(help="Seconds between two kills.")] = 20.0,
    inter_token_seconds: Annotated[float, typer.Option(help="Between two tokens.")] = 0.25,
    answer: Annotated[int, typer.Option(help="Tokens of each answer.")] = 24,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.")] = 8,
    ttl_seconds: Annotated[float, typer.Option(help="How long decode keeps a turn.")] = 40.0,
    settle_seconds: Annotated[
        float, typer.Option(help="Until errors of a killed process that is back must end.")
    ] = 6.0,
    workers: Workers = 2,
    routers: Annotated[int, typer.Option(min=1, help="Routers.")] = 2,
    seed: Seed = None,
    out: Out = None,
) -> None:
    """Conversations that go on while kvmeta, sidecars and routers are killed at random."""
    crowd = Crowd(
        conversations=conversations,
        seconds=seconds,
        pause_seconds=4.0,
        turn_seconds=60.0 + 4 * answer * inter_token_seconds,
        patience_seconds=90.0,
        lengths=Lengths((60, 160), answer, turns),
    )
    shape = Shape(
        workers=workers,
        routers=routers,
        inter_token_seconds=inter_token_seconds,
        ttl_seconds=ttl_seconds,
        prefill_blocks=1000,
    )
    attack = Attack(kill_every, settle_seconds)
    _run(seed, out, lambda around: run_chaos(crowd, attack, shape, around))


def _run(
    seed: int | None,
    out: Path | None,
    make: Callable[[Surroundings], Coroutine[Any, Any, Report]],
) -> None:
    chosen = random.randrange(10**6) if seed is None else seed
    _console.print(f"seed {chosen}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="soak-") as name, Status("starting") as status:
        folder = Path(name)
        logs = out if out is not None else folder
        logs.mkdir(parents=True, exist_ok=True)
        around = Surroundings(folder, logs, chosen, time.monotonic, status.update)
        report: Report = uvloop.run(make(around))
    show(report, _console)
    _console.print(f"load of the machine now {os.getloadavg()[0]:.1f}")
    if out is not None:
        (out / "soak.json").write_bytes(document(report))
    if not report.passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
