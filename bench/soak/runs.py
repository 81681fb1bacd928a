"""The two runs, put together."""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.relay.processes import cpu_seconds
from bench.soak import verdicts
from bench.soak.chaos import Attack, Conversations, Crowd, Killer
from bench.soak.faults import Dice
from bench.soak.leftovers import Inspector, Look, inspecting
from bench.soak.memory import MemoryWatch, trend
from bench.soak.referee import Referee
from bench.soak.report import Report
from bench.soak.speakers import Front, fronts
from bench.soak.stack import BLOCK_SIZE, MODEL, Shape, Stack, lay_out, running
from bench.soak.streams import Load, Streams
from bench.soak.tally import Tally
from kvloop.errors import KvloopError
from kvloop.stack.ports import PortPool

_READY_SECONDS = 120.0
_TRY_SECONDS = 0.2
_STEADY_LOOKS = 4
"""Looks in a row that show the same before the load begins: streams between services are
opened one after the other."""
_PROGRESS_SECONDS = 1.0
_LATE_SECONDS = 30.0
"""Beyond the TTL of what is retained: a busy machine is late with everything."""

Progress = Callable[[str], None]
"""Told now and then how it goes, in a line."""


@dataclass(frozen=True)
class Surroundings:
    """What a run is given.

    Attributes:
        folder: for sockets and the ledger's database.
        logs: for logs of processes.
        seed: decides all that is left to chance, but not the order of what happens at once.
        clock: seconds on a clock that never goes back.
        progress: told how it goes.
    """

    folder: Path
    logs: Path
    seed: int
    clock: Callable[[], float]
    progress: Progress


async def run_streams(load: Load, fault_share: float, shape: Shape, around: Surroundings) -> Report:
    """Streams through one router, some of which meet a fault.

    Args:
        load: how streams behave.
        fault_share: share of the turns that meet a fault.
        shape: what they go through.
        around: where and how.
    """
    rng = random.Random(around.seed)
    async with _stack(shape, around) as (stack, inspector, ways):
        tally = Tally()
        said = _conditions(shape, around) | {
            "streams": f"{load.streams} at once, begun over {load.ramp_seconds:g} s, "
            f"turns begin for {load.seconds:g} s",
            "faults": f"{fault_share:.1%} of the turns",
            "conversations": str(load.lengths),
        }
        report = Report("streams", said, tally, await _before(inspector))
        streams = Streams(
            load,
            ways[0],
            Referee(MODEL, BLOCK_SIZE),
            Dice(fault_share, random.Random(rng.random())),
            tally,
            clock=around.clock,
            rng=random.Random(rng.random()),
        )
        watch = MemoryWatch([each.service for each in stack.routers], around.clock)
        async with _observed(report, stack, watch, around, lambda: streams.attempts.open):
            await streams.run()
        began = around.clock() - report.seconds
        found = {
            name: trend(samples, began + 2 * load.ramp_seconds, began + load.seconds)
            for name, samples in watch.samples.items()
        }
        report.trends = {name: each for name, each in found.items() if each is not None}
        report.verdicts = [*verdicts.on_answers(tally), *verdicts.on_memory(report.trends)]
        await _rest(report, shape, stack, inspector, around)
    return report


async def run_chaos(crowd: Crowd, attack: Attack, shape: Shape, around: Surroundings) -> Report:
    """Conversations that go on while processes are killed.

    Args:
        crowd: who talks.
        attack: how processes are killed.
        shape: what there is.
        around: where and how.
    """
    rng = random.Random(around.seed)
    async with _stack(shape, around) as (stack, inspector, ways):
        tally = Tally()
        said = _conditions(shape, around) | {
            "conversations": f"{crowd.conversations} at once for {crowd.seconds:g} s; "
            f"{crowd.lengths}",
            "attack": f"one process every {attack.every_seconds:g} s",
            "excused": "errors while a router or a decode sidecar is away, and until "
            f"{attack.settle_seconds:g} s after it serves again",
        }
        report = Report("chaos", said, tally, await _before(inspector))
        killer = Killer(
            attack,
            stack.victims(),
            stack.seen_by_clients(),
            around.clock,
            random.Random(rng.random()),
        )
        talking = Conversations(
            crowd,
            ways,
            Referee(MODEL, BLOCK_SIZE),
            killer,
            tally,
            clock=around.clock,
            rng=random.Random(rng.random()),
        )
        watch = MemoryWatch(stack.victims(), around.clock)
        async with (
            _observed(report, stack, watch, around, lambda: talking.attempts.open),
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(killer.run(crowd.seconds), name="killer")
            tasks.create_task(talking.run(), name="conversations")
        report.kills = dict(sorted(killer.kills.items()))
        report.verdicts = [
            verdicts.on_kills(killer.kills),
            *verdicts.on_answers(tally),
        ]
        await _rest(report, shape, stack, inspector, around)
    return report


@asynccontextmanager
async def _stack(
    shape: Shape, around: Surroundings
) -> AsyncIterator[tuple[Stack, Inspector, list[Front]]]:
    with PortPool() as ports:
        stack = lay_out(shape, around.logs, around.folder, ports)
        async with (
            running(stack),
            inspecting(stack) as inspector,
            fronts(stack.routers) as ways,
        ):
            async with asyncio.timeout(_READY_SECONDS):
                for front in ways:
                    await _until_known(front, shape)
            yield stack, inspector, ways


async def _before(inspector: Inspector) -> Look:
    """What stands before the load, once all is quiet and services have found each other."""
    looks: deque[Look] = deque(maxlen=_STEADY_LOOKS)

    def steady(look: Look) -> bool:
        looks.append(look)
        return len(looks) == _STEADY_LOOKS and all(
            each.quiet and each.standing == look.standing for each in looks
        )

    return await inspector.until(steady, _READY_SECONDS, lambda _: None)


async def _until_known(front: Front, shape: Shape) -> None:
    """Wait until a router knows all workers."""
    while True:
        try:
            models = await front.grpc.models()
        except KvloopError:
            models = []
        if any(each.prefill_workers + each.decode_workers == 2 * shape.workers for each in models):
            return
        await asyncio.sleep(_TRY_SECONDS)


@asynccontextmanager
async def _observed(
    report: Report,
    stack: Stack,
    watch: MemoryWatch,
    around: Surroundings,
    open_turns: Callable[[], int],
) -> AsyncIterator[None]:
    """Watch memory and CPU time and tell how it goes while the block runs."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            tally = report.tally
            around.progress(
                f"{around.clock() - began:.0f} s: {open_turns()} turns under way, "
                f"{tally.turns} answered, {tally.excused.total()} errors called for, "
                f"{tally.unexcused.total()} not, {tally.wrong} wrong, {tally.hung} hanging"
            )

    began = around.clock()
    spent = _cpu(stack)
    async with asyncio.TaskGroup() as tasks:
        watching = [
            tasks.create_task(watch.run(), name="memory"),
            tasks.create_task(tell(), name="progress"),
        ]
        yield
        for task in watching:
            task.cancel()
    report.seconds = around.clock() - began
    now = _cpu(stack)
    report.cpu = {
        name: (now[name] - spent[name]) / report.seconds
        for name in now
        if name in spent and now[name] >= spent[name]
    }
    report.samples = watch.samples


def _cpu(stack: Stack) -> dict[str, float]:
    """Processor time so far, of the lives that processes have now."""
    found = {}
    for service in stack.services:
        try:
            found[f"{service.name} ({service.pid})"] = cpu_seconds(service.pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    found["clients and referee"] = cpu_seconds(os.getpid())
    return found


async def _rest(
    report: Report,
    shape: Shape,
    stack: Stack,
    inspector: Inspector,
    around: Surroundings,
) -> None:
    """Wait until nothing is held any more, and judge what is."""
    began = around.clock()

    def tell(look: Look) -> None:
        waits = ", ".join([*look.still_held, *(f"{name} away" for name in look.away)])
        around.progress(f"at rest for {around.clock() - began:.0f} s; still there: {waits}")

    def rests(look: Look) -> bool:
        # A call that is under way just now has tasks and files, too.
        return look.quiet and not verdicts.left_over(report.before, look)

    seconds = shape.settled_after_seconds + _LATE_SECONDS
    report.after = await inspector.until(rests, seconds, tell)
    report.settled_seconds = around.clock() - began
    report.router = await inspector.counted()
    ends = {service.name: service.ends for service in stack.services}
    report.verdicts += verdicts.on_rest(report.before, report.after, ends)


def _conditions(shape: Shape, around: Surroundings) -> dict[str, str]:
    return {
        "seed": str(around.seed),
        "processes": f"routers {shape.routers}; {shape.workers} prefill and {shape.workers} "
        "decode workers, kvmeta on SQLite",
        "decode engines": f"a token every {shape.inter_token_seconds:g} s",
        "retention": f"TTL {shape.ttl_seconds:g} s, lease {shape.pin_lease_seconds:g} s",
    }
