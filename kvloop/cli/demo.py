"""`kvloop demo`: what reuse gains, measured on this machine."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvloop.aio import AsyncClient
from kvloop.cli import options
from kvloop.cli.exits import FAILED, INTERRUPTED
from kvloop.cli.interrupts import cancel_on_signal
from kvloop.cli.local_model import resolve_model
from kvloop.cli.progress import ProgressView
from kvloop.demo import DemoResult, DemoScript, TurnComparison, run_demo
from kvloop.stack import Stack, StackSettings, make_workers
from kvloop.stack.gpus import detect_gpus

_INTRODUCTION = """\
One conversation of {turns} turns, held twice: with reuse off, and with reuse on.
Prefill runs with --no-enable-prefix-caching. It stands for one of many prefill
nodes that has not seen the conversation, so whatever it does not pull from the
decode node it computes.
"""


def demo(
    model: options.ModelPath = "",
    turns: Annotated[int, typer.Option(min=2, help="Turns of the conversation.")] = 4,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 48,
    engine_args: options.EngineArgs = "",
    run_dir: options.RunDir = "",
    start_timeout: options.StartTimeout = 600.0,
) -> None:
    """Hold a scripted conversation with reuse off and on, and compare.

    Starts a stack of one prefill and one decode worker, runs the same turns both
    ways in alternation, each with its own conversation id and cache salt, and ends
    in a table. Fails if a turn after the first pulled nothing, or if an answer
    differed by a token.

    \b
    Examples:
      kvloop demo
      kvloop demo --model /models/qwen3-8b --turns 6
    """
    settings = StackSettings(
        model=resolve_model(model),
        workers=make_workers(
            engine_args=engine_args, prefill_engine_args="--no-enable-prefix-caching"
        ),
        run_dir=Path(run_dir) if run_dir else None,
        gpus=detect_gpus(),
        start_timeout_seconds=start_timeout,
    )
    script = DemoScript(turns=turns, answer_tokens=answer_tokens)
    result = asyncio.run(_run(settings, script, Console()))
    raise typer.Exit(INTERRUPTED if result is None else exit_status_of(result, settings))


async def _run(settings: StackSettings, script: DemoScript, console: Console) -> DemoResult | None:
    """Run the demo on a stack of its own; None if it was interrupted."""
    clock = time.monotonic
    with ProgressView(console, clock) as view:
        stack = Stack(settings, on_change=view.update, clock=clock)
        with cancel_on_signal(stack.kill_all) as interrupts:
            try:
                async with stack, AsyncClient(stack.router_address) as client:
                    console.print(_INTRODUCTION.format(turns=script.turns), highlight=False)
                    result = await run_demo(
                        client,
                        settings.model_name,
                        script,
                        name=f"demo-{secrets.token_hex(4)}",
                        clock=clock,
                        on_turn=lambda turn: console.print(progress_line(turn), highlight=False),
                    )
            except asyncio.CancelledError:
                if not interrupts.count:
                    raise
                return None
    console.print(result_table(result))
    console.print(verdict(result, exact=not settings.gpus), highlight=False)
    return result


def progress_line(turn: TurnComparison) -> str:
    """What is said when a turn is over."""
    return (
        f"turn {turn.turn}: first token after {_ms(turn.ttft_off_seconds)} without reuse, "
        f"{_ms(turn.ttft_on_seconds)} with"
    )


def result_table(result: DemoResult) -> Table:
    """The turns, side by side."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("turn", justify="right")
    for column in ("context", "pulled", "recomputed", "TTFT off", "TTFT on", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for turn in result.turns:
        table.add_row(
            str(turn.turn),
            f"{turn.context_tokens:,}",
            f"{turn.pulled_tokens:,}",
            f"{turn.recomputed_tokens:,}",
            _ms(turn.ttft_off_seconds),
            _ms(turn.ttft_on_seconds),
            f"{turn.ratio:.1f}x",
        )
    return table


def verdict(result: DemoResult, *, exact: bool) -> str:
    """Whether what was shown is what should be.

    Args:
        result: what was shown.
        exact: recomputing gives the same tokens every time. It does on a CPU in
            float32; on a GPU in bf16 near-ties go either way, also without kvloop.
    """
    differing = ", ".join(str(turn.turn) for turn in result.turns if not turn.identical)
    missed = ", ".join(
        f"{turn.turn} ({(turn.miss_reason or 'no reason given').lower().replace('_', ' ')})"
        for turn in result.turns[1:]
        if not turn.pulled_tokens
    )
    if not differing:
        answers = "Greedy answers with and without reuse are token-identical in every turn."
    elif exact:
        answers = f"FAILED: greedy answers with and without reuse differ in turn {differing}."
    else:
        answers = (
            f"Greedy answers with and without reuse differ in turn {differing}. In bf16 two "
            "recomputations differ as well, at near-ties; --engine-args '--dtype float32' "
            "tells the two apart."
        )
    return f"{answers}\nFAILED: nothing was pulled in turn {missed}." if missed else answers


def exit_status_of(result: DemoResult, settings: StackSettings) -> int:
    """0 if the demo showed what it should; see `verdict`."""
    return 0 if result.reused and (result.identical or settings.gpus) else FAILED


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
