"""Runs `kvloop bench ttft` against a stack and shows how far it has got."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvloop.aio import AsyncClient
from kvloop.bench.decode_fleet import DecodeFleet, KvmetaFleet
from kvloop.bench.rounds import Progress as RoundProgress
from kvloop.bench.rounds import RoundPlan, Variant, run_rounds
from kvloop.bench.samples import KvBlocks, Run
from kvloop.bench.schedule import Advance, SchedulePlan, run_schedule
from kvloop.bench.scripts import TokenStreams
from kvloop.bench.slowdown import Slowdown, slowdown
from kvloop.bench.traffic import Traffic, TrafficPlan, traffic
from kvloop.bench.transfers import HttpPrefillEngine
from kvloop.bench.turns import KvloopTurns, TurnRunner
from kvloop.cli.interrupts import cancel_on_signal
from kvloop.errors import KvloopError
from kvloop.tls import TlsSource


@dataclass(frozen=True)
class Measurement:
    """What to measure, and where.

    Attributes:
        router: host:port of the router.
        kvmeta: host:port of kvmeta.
        tls: how to speak TLS; without it nothing is encrypted.
        model: served model name.
        plan: rounds, or a workload.
        control: hold everything once more without reuse.
        prefill_url: vLLM server of the only prefill worker; empty if it is not asked.
        traffic: other requests at once meanwhile.
        vocabulary: tokens are drawn from 10 up to this.
        seed: of tokens and order.
    """

    router: str
    kvmeta: str
    tls: TlsSource | None
    model: str
    plan: RoundPlan | SchedulePlan
    control: bool
    prefill_url: str
    traffic: int
    vocabulary: int
    seed: int

    @property
    def alone(self) -> bool:
        """True if never more than one conversation is held at a time."""
        return isinstance(self.plan, RoundPlan) and all(
            shape.conversations == 1 for shape in self.plan.shapes
        )


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        run: all samples.
        slowdown: what other requests felt; None if there were none.
    """

    run: Run
    slowdown: Slowdown | None


def measure(wanted: Measurement, console: Console) -> Measured | None:
    """Run the plan; None if it was interrupted.

    Raises:
        KvloopError: the prefill engine cannot be asked.
    """
    return asyncio.run(_measure(wanted, console))


async def _measure(wanted: Measurement, console: Console) -> Measured | None:
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

        def advance(done: int, total: int, line: str) -> None:
            bar.update(task, description=line, completed=done, total=total)

        try:
            async with AsyncClient(wanted.router, tls=wanted.tls) as client:
                turns = KvloopTurns(client, wanted.model, time.perf_counter)
                return await _hold(wanted, turns, advance, console)
        except asyncio.CancelledError:
            if not interrupts.count:
                raise
            return None


async def _hold(
    wanted: Measurement,
    turns: TurnRunner,
    advance: Callable[[int, int, str], None],
    console: Console,
) -> Measured:
    prefill = HttpPrefillEngine(wanted.prefill_url) if wanted.prefill_url else None
    variants = [Variant("on", turns, True, prefill), Variant("off", turns, False, prefill)]
    if wanted.control:
        variants.append(Variant("control", turns, False, prefill))
    fleet, blocks = await _fleet(wanted, console)
    name = f"bench-{secrets.token_hex(4)}"
    source = random.Random(wanted.seed)
    async with _others(wanted, turns, name) as seen:
        if isinstance(wanted.plan, SchedulePlan):
            run = await run_schedule(
                variants,
                wanted.plan,
                TokenStreams(wanted.seed, wanted.vocabulary),
                name=name,
                source=source,
                clock=time.perf_counter,
                on_progress=lambda a: advance(a.done, a.total, advance_line(a)),
                fleet=fleet,
            )
        else:
            run = await run_rounds(
                variants,
                wanted.plan,
                name=name,
                source=source,
                clock=time.perf_counter,
                on_progress=lambda p: advance(p.done, p.total, progress_line(p)),
                fleet=fleet,
            )
    run = replace(run, blocks=blocks)
    felt = None
    if seen is not None:
        felt = slowdown(seen, run, prefill_legs_only=wanted.alone)
    return Measured(run, felt)


async def _fleet(
    wanted: Measurement, console: Console
) -> tuple[DecodeFleet | None, KvBlocks | None]:
    """The decode workers, if kvmeta tells of them."""
    fleet = KvmetaFleet(wanted.kvmeta, wanted.model, wanted.tls)
    try:
        return fleet, await fleet.blocks()
    except KvloopError as error:
        console.print(
            f"without retained blocks and bytes: {error.message}", markup=False, highlight=False
        )
        return None, None


@asynccontextmanager
async def _others(
    wanted: Measurement, turns: TurnRunner, name: str
) -> AsyncIterator[Traffic | None]:
    """Other requests for as long as the block runs, if there shall be any."""
    if not wanted.traffic:
        yield None
        return
    async with traffic(
        turns,
        TrafficPlan(wanted.traffic, vocabulary=wanted.vocabulary),
        name=f"{name}-others",
        source=random.Random(wanted.seed + 1),
        clock=time.perf_counter,
    ) as seen:
        yield seen


def progress_line(progress: RoundProgress) -> str:
    """What is shown beside the bar after a round."""
    return (
        f"{progress.shape.context_tokens:,} tokens, turn {progress.turn}, "
        f"reuse {progress.variant}: {_took(progress.ttft_seconds)}"
    )


def advance_line(advance: Advance) -> str:
    """What is shown beside the bar after a turn of a workload."""
    return (
        f"{advance.prompt_tokens:,} tokens, turn {advance.turn}, "
        f"reuse {advance.variant}: {_took(advance.ttft_seconds)}"
    )


def _took(ttft_seconds: float | None) -> str:
    return "failed" if ttft_seconds is None else f"{ttft_seconds * 1000:,.0f} ms"
