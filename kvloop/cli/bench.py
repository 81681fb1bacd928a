"""`kvloop bench`: what reuse gains on a running stack."""

from __future__ import annotations

import random
import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvloop.bench.arrivals import Arrivals
from kvloop.bench.cells import cells
from kvloop.bench.rounds import RoundPlan
from kvloop.bench.samples import Shape
from kvloop.bench.schedule import SchedulePlan
from kvloop.bench.scripts import FIRST_TOKEN, Script, synthetic
from kvloop.bench.traces import TraceFormat, read_trace
from kvloop.cli import options
from kvloop.cli.bench_report import report, write
from kvloop.cli.bench_run import Measurement, measure
from kvloop.cli.exits import FAILED, INTERRUPTED
from kvloop.cli.served_model import choose_model
from kvloop.cli.tls import tls_of
from kvloop.client import DEFAULT_ROUTER, Client
from kvloop.errors import InvalidFieldError
from kvloop.inventory import DEFAULT_KVMETA

app = typer.Typer(no_args_is_help=True, help="Measure what reuse gains on a running stack.")

_ROUND_REPETITIONS = 5
_CONVERSATIONS = 50
_SETTLE_SECONDS = 0.3
"""In which an engine whose pulls are counted frees what the round before has left."""
_WORKLOAD_SETTLE_SECONDS = 1.0


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
        str,
        typer.Option(
            help="Conversations at once (closed loop); several with commas.", show_default="1"
        ),
    ] = "",
    rate: Annotated[
        float,
        typer.Option(
            min=0,
            help="Conversations that begin per second, at random (open loop, Poisson).",
            show_default="closed loop",
        ),
    ] = 0.0,
    conversations: Annotated[
        int,
        typer.Option(
            min=0,
            help="Conversations with --rate; with --trace: its first ones.",
            show_default="50; all of a trace",
        ),
    ] = 0,
    trace: Annotated[
        str, typer.Option(help="File with recorded conversations.", show_default="synthetic ones")
    ] = "",
    trace_format: Annotated[
        TraceFormat, typer.Option(help="Form of the trace.")
    ] = TraceFormat.AUTO,
    time_scale: Annotated[
        float, typer.Option(help="Recorded times and pauses pass that many times faster.")
    ] = 1.0,
    characters_per_token: Annotated[
        float, typer.Option(help="Length of a token, in traces that hold text.")
    ] = 4.0,
    think: Annotated[float, typer.Option(min=0, help="Seconds between two turns.")] = 0.0,
    repetitions: Annotated[
        int,
        typer.Option(
            min=0,
            help="Repetitions; medians need 5.",
            show_default="5; 1 with --rate or --trace",
        ),
    ] = 0,
    warm_ups: Annotated[
        int,
        typer.Option(
            min=0, help="Repetitions (conversations with --rate or --trace) that do not count."
        ),
    ] = 1,
    control: Annotated[
        bool, typer.Option(help="Recompute everything once more, to compare answers with.")
    ] = True,
    traffic: Annotated[
        int, typer.Option(min=0, help="Other requests kept running on the stack meanwhile.")
    ] = 0,
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
        int, typer.Option(min=FIRST_TOKEN + 1, help="Tokens are drawn from 10 up to this.")
    ] = 4000,
    seed: Annotated[int | None, typer.Option(help="Makes tokens and order repeatable.")] = None,
    out: Annotated[
        str, typer.Option(help="Folder for JSON, CSV and charts.", show_default="none written")
    ] = "",
    charts: Annotated[str, typer.Option(help="svg, png, or none.")] = "svg",
    router: options.Router = DEFAULT_ROUTER,
    kvmeta: options.Kvmeta = DEFAULT_KVMETA,
) -> None:
    """Time to the first token with reuse off and on, in one run.

    Conversations of random tokens are held through the router with reuse off, on, and (the
    control) off again. The answers of all ways are compared.

    Closed loop (the default): the same prompts, turn by turn, ways in random order, as many
    conversations at once as --concurrency says.

    Open loop: conversations begin at a --rate, or as a --trace recorded, whether or not
    earlier ones have ended. Each way holds the whole workload, one way after the other.
    A trace is JSON lines of kvloop's own form (see docs/benchmarks.md) or Mooncake's
    (timestamp, input_length, output_length, hash_ids), or ShareGPT's JSON (lengths are taken
    from its text). With --concurrency a trace is held in a closed loop.

    For a cold prefill engine give --cold (vLLM with VLLM_SERVER_DEV_MODE=1; in open loops it
    is emptied once per way), or start prefill with --no-enable-prefix-caching. kvmeta tells
    the size of KV blocks and how many are retained; without it these columns are empty.

    \b
    Examples:
      kvloop bench ttft
      kvloop bench ttft --context 8192,32768 --turns 4 --out results
      kvloop bench ttft --concurrency 1,8 --think 2 --traffic 4
      kvloop bench ttft --rate 0.5 --conversations 100 --context 2048,8192
      kvloop bench ttft --trace mooncake.jsonl --time-scale 2 --conversations 200
      kvloop bench ttft --cold --prefill-engine-url http://127.0.0.1:8100
    """
    if cold and not prefill_engine_url:
        raise typer.BadParameter("--cold needs --prefill-engine-url")
    if charts not in ("svg", "png", "none"):
        raise typer.BadParameter("--charts is svg, png or none")
    seed = secrets.randbits(32) if seed is None else seed
    settle = _SETTLE_SECONDS if prefill_engine_url else 0.05
    plan: RoundPlan | SchedulePlan
    try:
        contexts, answers = _numbers(context), _numbers(answer)
        if trace or rate:
            scripts = (
                _recorded(trace, trace_format, characters_per_token, conversations)
                if trace
                else synthetic(
                    random.Random(seed),
                    conversations or _CONVERSATIONS,
                    context_tokens=contexts,
                    answer_tokens=answers,
                    message_tokens=message,
                    turns=turns,
                    pause_seconds=think,
                )
            )
            plan = SchedulePlan(
                Path(trace).name if trace else "synthetic",
                scripts,
                Arrivals(rate or None, int(concurrency) if concurrency else None, time_scale),
                repetitions or 1,
                warm_ups,
                cold=cold,
                settle_seconds=_WORKLOAD_SETTLE_SECONDS,
            )
            plan.arrivals.starts(scripts, random.Random(seed))  # or the run would refuse later
        else:
            plan = RoundPlan(
                [
                    Shape(tokens, length, message, turns, length, at_once)
                    for at_once in _numbers(concurrency or "1")
                    for length in answers
                    for tokens in contexts
                ],
                repetitions or _ROUND_REPETITIONS,
                warm_ups,
                cold=cold,
                think_seconds=think,
                vocabulary=vocabulary,
                settle_seconds=settle,
            )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    except InvalidFieldError as error:
        raise typer.BadParameter(f"{trace}: {error.message}") from error
    tls = tls_of(command)
    with Client(router, tls=tls) as client:
        name = choose_model(client, model)
    console = Console()
    measured = measure(
        Measurement(
            router=router,
            kvmeta=kvmeta,
            tls=tls,
            model=name,
            plan=plan,
            control=control,
            prefill_url=prefill_engine_url,
            traffic=traffic,
            vocabulary=vocabulary,
            seed=seed,
        ),
        console,
    )
    if measured is None:
        raise typer.Exit(INTERRUPTED)
    found = cells(measured.run)
    report(measured, found, console)
    if out:
        conditions = {
            "model": name,
            "seed": seed,
            "cold": cold,
            "repetitions": plan.repetitions,
            "arrivals": str(plan.arrivals) if isinstance(plan, SchedulePlan) else "rounds",
            "trace": trace or None,
            "traffic": traffic,
        }
        for path in write(Path(out), measured, found, conditions, charts, console):
            console.print(f"wrote {path}", highlight=False)
    raise typer.Exit(FAILED if any(cell.failures for cell in found) else 0)


def _recorded(path: str, form: TraceFormat, characters_per_token: float, most: int) -> list[Script]:
    """The conversations of a trace, or its first ones.

    Raises:
        InvalidFieldError: the file does not have the form.
        OSError: it cannot be read.
    """
    found = read_trace(Path(path), form, characters_per_token=characters_per_token)
    return found[:most] if most else found


def _numbers(text: str) -> list[int]:
    """Numbers with commas between them.

    Raises:
        ValueError: one is not a number.
    """
    return [int(part) for part in text.split(",")]
