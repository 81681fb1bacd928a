"""Runs parts of the proof on a GPU.

    python3 -m bench.gpu.run exact q8 --out FOLDER [--budget SECONDS]

All engines that the parts need start at once. A part that fails is told and the next
one runs; what was found up to there is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tarfile
import time
import traceback
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
from rich.console import Console

from bench.gpu.bare import BareTurns, DecodeAlone
from bench.gpu.bare_engines import bare_engines
from bench.gpu.engine_times import EngineWatch
from bench.gpu.engines import EnginePair, engine_pairs, rehearsal_pairs
from bench.gpu.gateway import GatewayTurns
from bench.gpu.hops import hop_table
from bench.gpu.host import machine
from bench.gpu.observed import Book
from bench.gpu.outcome import HostWatch, Outcome
from bench.gpu.parts import PARTS
from bench.gpu.spans import SpanSink, span_sink, tracing_environment, tracing_is_installed
from bench.gpu.split import SplitTurns
from bench.gpu.ways import Bench, Ways
from kvloop.aio import AsyncClient
from kvloop.bench.cells import cells
from kvloop.bench.rounds import Progress
from kvloop.bench.samples import Shape
from kvloop.bench.tables import output_lines, ttft_table
from kvloop.bench.turns import KvloopTurns
from kvloop.stack import ProcessState, ProcessStatus, Stack
from services.worker.engine_command import CONNECTION_SECONDS

_REHEARSAL_SCALE = 16
_REHEARSAL_REPETITIONS = 3
_TURN_SECONDS = 90.0
"""A turn that takes longer has failed."""
_REST_SECONDS = 25.0
"""Kept back from the budget, for stopping engines and writing files."""


class _Report:
    """Says what happens, with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.console = Console(width=190, highlight=False, markup=False, file=sys.stdout)

    def say(self, text: str) -> None:
        self.console.print(f"[{time.monotonic() - self._began:5.0f} s] {text}", soft_wrap=True)

    def process(self, pair: str, status: ProcessStatus) -> None:
        if status.state in (ProcessState.READY, ProcessState.FAILED) and "-" in status.name:
            self.say(f"{pair}: {status.name} {status.state.value}")

    def progress(self, progress: Progress) -> None:
        if progress.turn < progress.shape.turns or progress.variant != "on":
            return
        ttft = progress.ttft_seconds
        told = "FAILED" if ttft is None else f"{ttft * 1000:.0f} ms"
        self.say(
            f"{progress.done}/{progress.total} {progress.shape.context_tokens} tokens "
            f"turn {progress.turn} {progress.variant}: {told}"
        )


@asynccontextmanager
async def _kvloop(
    pair: EnginePair, run_dir: Path, tracing: Mapping[str, str], report: _Report
) -> AsyncIterator[Ways]:
    stack = Stack(
        pair.stack_settings(run_dir, tracing),
        on_change=lambda status: report.process(pair.name, status),
    )
    async with stack, AsyncClient(stack.router_address) as client, _session() as session:
        model, clock = pair.model_name, time.perf_counter
        prefill_url, decode_url = stack.engine_url("prefill-0"), stack.engine_url("decode-0")
        turns = KvloopTurns(
            client, model, clock, timeout_seconds=_TURN_SECONDS, last_ids=pair.compared
        )
        yield Ways(
            turns,
            prefill_url,
            decode_url,
            bare=BareTurns(session, prefill_url, decode_url, model, clock, last_ids=pair.compared),
            gateway=GatewayTurns(turns, session, stack.gateway_url, model, clock),
            split=SplitTurns(
                turns, session, prefill_url, model, tail_tokens=Shape(1).message_tokens
            ),
            decode_alone=DecodeAlone(session, prefill_url, decode_url, model, clock),
            watch=EngineWatch(prefill_url, decode_url),
            kvmeta=stack.kvmeta_address,
            lease_seconds=pair.lease_seconds,
        )


@asynccontextmanager
async def _bare(pair: EnginePair, run_dir: Path) -> AsyncIterator[Ways]:
    async with bare_engines(pair, run_dir) as engines, _session() as session:
        prefill_url, decode_url = engines.prefill_url, engines.decode_url
        turns = BareTurns(
            session,
            prefill_url,
            decode_url,
            pair.model_name,
            time.perf_counter,
            last_ids=pair.compared,
        )
        yield Ways(turns, prefill_url, decode_url, watch=EngineWatch(prefill_url, decode_url))


@asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    # As a sidecar keeps them: the bare protocol shall not have to connect anew either.
    connections = aiohttp.TCPConnector(keepalive_timeout=CONNECTION_SECONDS)
    timeout = aiohttp.ClientTimeout(total=_TURN_SECONDS)
    async with aiohttp.ClientSession(connector=connections, timeout=timeout) as session:
        yield session


async def _start(
    pairs: list[EnginePair],
    runs: Path,
    tracing: Mapping[str, str],
    stack: AsyncExitStack,
    report: _Report,
) -> dict[str, Ways]:
    """Start all engines at once; those that do not come up are left out."""

    async def start(pair: EnginePair) -> tuple[str, Ways | Exception]:
        run_dir = runs / pair.name
        opening = _bare(pair, run_dir) if pair.bare else _kvloop(pair, run_dir, tracing, report)
        try:
            return pair.name, await stack.enter_async_context(opening)
        except Exception as error:  # one pair that fails shall not cost the others
            return pair.name, error

    ways = {}
    for name, started in await asyncio.gather(*map(start, pairs)):
        if isinstance(started, Exception):
            shown = "\n".join(getattr(started, "last_lines", ())) or ""
            report.say(f"FAILED to start {name}: {started}\n{shown[-3000:]}")
        else:
            ways[name] = started
    report.say(f"running: {', '.join(ways) or 'nothing'}")
    return ways


async def _run(arguments: argparse.Namespace) -> bool:
    names, out, runs = arguments.parts, arguments.out, arguments.runs
    report = _Report()
    deadline = time.monotonic() + arguments.budget - _REST_SECONDS
    known = rehearsal_pairs(arguments.rehearse) if arguments.rehearse else engine_pairs()
    seed = time.time_ns()
    good = True
    try:
        async with AsyncExitStack() as stack:
            report.say(f"machine: {json.dumps(machine())}")
            sink = await stack.enter_async_context(span_sink()) if tracing_is_installed() else None
            tracing = tracing_environment(sink.url) if sink is not None else {}
            report.say("turns can be traced" if tracing else "NO TRACES: OpenTelemetry is missing")
            engines = dict.fromkeys(e for name in names for e in PARTS[name].engines)
            pairs = [known[name] for name in engines if name in known]
            bench = Bench(
                ways=await _start(pairs, runs, tracing, stack, report),
                clock=time.perf_counter,
                wall_clock=time.time_ns,
                stop=lambda: time.monotonic() > deadline,
                on_progress=report.progress,
                source=random.Random(seed),
                scale=_REHEARSAL_SCALE if arguments.rehearse else 1,
                most_repetitions=_REHEARSAL_REPETITIONS if arguments.rehearse else None,
            )
            for name in names:
                good &= await _run_part(name, bench, sink, out, report)
    finally:
        _keep_logs(runs, out)
    report.say("done" if good else "done, with failures")
    return good


async def _run_part(
    name: str, bench: Bench, sink: SpanSink | None, out: Path, report: _Report
) -> bool:
    report.say(f"== {name}: {PARTS[name].run.__doc__}")
    path = out / f"{name}.json"
    found = Outcome(
        book=Book(sink),
        host=HostWatch(bench.clock),
        kept=lambda outcome: _write(path, outcome, "the part had not ended"),
    )
    error = ""
    for step in (partial(PARTS[name].run, bench, found), found.finish):
        try:
            await step()
        except Exception:  # what was found is written, and the next part runs, all the same
            error += traceback.format_exc()
            report.say(f"FAILED {name}: {error[-2000:]}")
    _write(path, found, error)
    for title, run in found.runs.items():
        report.say(f"{name}: {title}")
        last = [cell for cell in cells(run) if cell.turn > 1]
        report.console.print(ttft_table(last))
        if failed := next((s.error for s in run.samples if s.error), None):
            report.say(f"a turn failed: {failed[:500]}")
    for title, seen in found.conditions.items():
        report.say(f"{title}, cores in use: {json.dumps(seen['cores'])}, load {seen['load']}")
    for columns in found.columns():
        report.console.print(hop_table(columns))
    for note in found.notes:
        report.say(note)
    for title, outputs in found.outputs.items():
        report.say(f"{title}: " + "; ".join(output_lines(outputs)))
    for check in found.checks:
        report.say(f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.detail}")
    for title, seen in found.traffic.items():
        report.say(f"{title}, other requests: {json.dumps(seen)}")
    return not error and all(check.passed for check in found.checks)


def _write(path: Path, found: Outcome, error: str) -> None:
    path.write_text(json.dumps({**found.records(), "error": error}))


def _keep_logs(runs: Path, out: Path) -> None:
    with tarfile.open(out / f"logs-{runs.name}.tar.gz", "w:gz") as archive:
        for log in sorted(runs.rglob("*.log")):
            archive.add(log, arcname=str(log.relative_to(runs)))


def main() -> int:
    """Run the parts; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--runs", type=Path, required=True, help="folder for logs and sockets")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for everything")
    parser.add_argument(
        "--rehearse", metavar="MODEL", help="on vLLM's CPU build with this model, and scaled down"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return 0 if asyncio.run(_run(arguments)) else 1


if __name__ == "__main__":
    sys.exit(main())
