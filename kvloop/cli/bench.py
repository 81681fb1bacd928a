"""`kvloop bench`: what reuse gains on a running stack."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvloop.aio import AsyncClient
from kvloop.bench import rounds
from kvloop.bench.cells import Cell, cells
from kvloop.bench.charts import write_charts
from kvloop.bench.files import write_csv, write_json
from kvloop.bench.outputs import check_outputs
from kvloop.bench.rounds import RoundPlan, Variant, run_rounds
from kvloop.bench.samples import Run, Shape
from kvloop.bench.tables import output_lines, ttft_table
from kvloop.bench.transfers import HttpPrefillEngine
from kvloop.bench.turns import KvloopTurns
from kvloop.cli import options
from kvloop.cli.exits import FAILED, INTERRUPTED
from kvloop.cli.interrupts import cancel_on_signal
from kvloop.cli.served_model import choose_model
from kvloop.cli.tls import tls_of
from kvloop.client import DEFAULT_ROUTER, Client
from kvloop.errors import UnsupportedError
from kvloop.tls import TlsSource

app = typer.Typer(no_args_is_help=True, help="Measure what reuse gains on a running stack.")


@app.callback()
def bench() -> None:
    """Measure what reuse gains on a running stack."""


@app.command("ttft")
def ttft(
    command: typer.Context,
    model: options.ServedModel = "",
    context: Annotated[
        str, typer.Option(help="Tokens of the first message; several with commas.")
    ] = "1024,4096",
    answer: Annotated[
        str, typer.Option(help="Tokens generated in each turn; several with commas.")
    ] = "64",
    message: Annotated[int, typer.Option(min=1, help="Tokens of each further message.")] = 200,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each conversation.")] = 3,
    concurrency: Annotated[
        str, typer.Option(help="Conversations at once; several with commas.")
    ] = "1",
    think: Annotated[float, typer.Option(min=0, help="Seconds between two turns.")] = 0.0,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions; medians need 5.")] = 5,
    warm_ups: Annotated[int, typer.Option(min=0, help="Repetitions that do not count.")] = 1,
    control: Annotated[
        bool, typer.Option(help="Recompute everything once more, to compare answers with.")
    ] = True,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold",
            help="Empty prefill's prefix cache before each turn; needs --prefill-engine-url.",
        ),
    ] = False,
    prefill_engine_url: Annotated[
        str, typer.Option(help="vLLM server of the only prefill worker: counts its pulls.")
    ] = "",
    vocabulary: Annotated[
        int, typer.Option(min=11, help="Tokens are drawn from 10 up to this.")
    ] = 4000,
    seed: Annotated[int | None, typer.Option(help="Makes tokens and order repeatable.")] = None,
    out: Annotated[
        str, typer.Option(help="Folder for JSON, CSV and charts.", show_default="none written")
    ] = "",
    charts: Annotated[str, typer.Option(help="svg, png, or none.")] = "svg",
    router: options.Router = DEFAULT_ROUTER,
) -> None:
    """Time to the first token with reuse off and on, in one run.

    Conversations of random tokens are held through the router with reuse off, on,
    and (the control) off again: the same prompts, turn by turn, in random order.
    Each conversation has its own cache salt. The answers of all ways are compared.

    For a cold prefill engine give --cold (vLLM with VLLM_SERVER_DEV_MODE=1), or
    start prefill with --no-enable-prefix-caching.

    \b
    Examples:
      kvloop bench ttft
      kvloop bench ttft --context 8192,32768 --turns 4 --out results
      kvloop bench ttft --cold --prefill-engine-url http://127.0.0.1:8100
    """
    if cold and not prefill_engine_url:
        raise typer.BadParameter("--cold needs --prefill-engine-url")
    if charts not in ("svg", "png", "none"):
        raise typer.BadParameter("--charts is svg, png or none")
    try:
        shapes = [
            Shape(tokens, length, message, turns, length, at_once)
            for at_once in _numbers(concurrency)
            for length in _numbers(answer)
            for tokens in _numbers(context)
        ]
        plan = RoundPlan(
            shapes,
            repetitions,
            warm_ups,
            cold=cold,
            think_seconds=think,
            vocabulary=vocabulary,
            settle_seconds=0.3 if prefill_engine_url else 0.05,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    tls = tls_of(command)
    with Client(router, tls=tls) as client:
        name = choose_model(client, model)
    console = Console()
    seed = secrets.randbits(32) if seed is None else seed
    run = asyncio.run(
        _measure(router, tls, name, plan, control, prefill_engine_url, random.Random(seed), console)
    )
    if run is None:
        raise typer.Exit(INTERRUPTED)
    found = cells(run)
    report(run, found, console)
    if out:
        conditions = {"model": name, "seed": seed, "cold": cold, "repetitions": repetitions}
        for path in write(Path(out), run, found, conditions, charts, console):
            console.print(f"wrote {path}", highlight=False)
    raise typer.Exit(FAILED if any(cell.failures for cell in found) else 0)


def report(run: Run, found: list[Cell], console: Console) -> None:
    """Print what was found."""
    console.print(ttft_table(found))
    for line in output_lines(check_outputs(run)):
        console.print(line, highlight=False)
    error = next((sample.error for sample in run.samples if sample.error), None)
    if error:
        console.print(f"some turns failed, for example: {error}", markup=False, highlight=False)


def write(
    folder: Path,
    run: Run,
    found: list[Cell],
    conditions: dict[str, object],
    charts: str,
    console: Console,
) -> list[Path]:
    """Write JSON, CSV and charts; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "ttft.json", folder / "ttft.csv"]
    write_json(paths[0], run, found, check_outputs(run), conditions)
    write_csv(paths[1], found)
    if charts == "none":
        return paths
    try:
        return [*paths, *write_charts(folder, found, charts)]
    except UnsupportedError as error:
        console.print(error.message, highlight=False)
        return paths


async def _measure(
    router: str,
    tls: TlsSource | None,
    model: str,
    plan: RoundPlan,
    control: bool,
    prefill_url: str,
    source: random.Random,
    console: Console,
) -> Run | None:
    """Run the plan; None if it was interrupted."""
    prefill = HttpPrefillEngine(prefill_url) if prefill_url else None
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with cancel_on_signal(lambda: None) as interrupts, bar:
        task = bar.add_task("warming up", total=None)

        def advance(progress: rounds.Progress) -> None:
            bar.update(
                task,
                description=progress_line(progress),
                completed=progress.done,
                total=progress.total,
            )

        try:
            async with AsyncClient(router, tls=tls) as client:
                taker = KvloopTurns(client, model, time.perf_counter)
                variants = [
                    Variant("on", taker, True, prefill),
                    Variant("off", taker, False, prefill),
                ]
                if control:
                    variants.append(Variant("control", taker, False, prefill))
                return await run_rounds(
                    variants,
                    plan,
                    name=f"bench-{secrets.token_hex(4)}",
                    source=source,
                    clock=time.perf_counter,
                    on_progress=advance,
                )
        except asyncio.CancelledError:
            if not interrupts.count:
                raise
            return None


def progress_line(progress: rounds.Progress) -> str:
    """What is shown beside the bar."""
    ttft = progress.ttft_seconds
    took = "failed" if ttft is None else f"{ttft * 1000:,.0f} ms"
    return (
        f"{progress.shape.context_tokens:,} tokens, turn {progress.turn}, "
        f"reuse {progress.variant}: {took}"
    )


def _numbers(text: str) -> list[int]:
    """Numbers with commas between them.

    Raises:
        ValueError: one is not a number.
    """
    return [int(part) for part in text.split(",")]
