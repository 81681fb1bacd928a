"""Takes while a great many handles expire at once."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.progress import Progress
from rich.table import Table

from bench.ledger import load
from bench.ledger.load import Measured
from bench.ledger.report import console, milliseconds, percentile, spread
from bench.ledger.stores import Contents, Kind, Server, serve

_LIVE_ROWS = 1_000
_SLICE_SECONDS = 1
_EXPIRED = 'kvloop_kvmeta_swept_rows_total{outcome="expired"}'


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    kinds: Sequence[Kind]
    due: int
    """Handles that expire at once."""
    after_seconds: float
    """When they do, from the begin of the ledger's filling."""
    repetitions: int
    """Per store, each on a new database."""
    concurrency: int
    """Turns at once."""
    params_bytes: int


@dataclass
class Observed:
    """Seconds of takes without and with a sweep, and how the sweep went."""

    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    sweep_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """The 99th percentile during the sweep, to that before it."""
        return percentile(self.during, 99) / percentile(self.before, 99)


def run(plan: Plan) -> None:
    """Measure every store, and print a table."""
    table = Table(
        title=f"takes while {plan.due:,} handles expire, {plan.concurrency} turns at once, "
        f"{plan.params_bytes:,} B of params, {plan.repetitions} repetitions"
    )
    for heading in ("store", "take ms before", "take ms during", "p99, during to before", "rows/s"):
        table.add_column(heading, justify="right")
    table.caption = "ms: 50th / 95th / 99th percentile. Medians of repetitions (least to most)."
    with Progress(console=console, transient=True) as progress:
        for kind in plan.kinds:
            observed = [_observe(plan, kind, progress) for _ in range(plan.repetitions)]
            table.add_row(
                kind,
                milliseconds([second for one in observed for second in one.before]),
                milliseconds([second for one in observed for second in one.during]),
                spread([one.ratio for one in observed], 1),
                spread([plan.due / one.sweep_seconds for one in observed], 0),
            )
    console.print(table)


def _observe(plan: Plan, kind: Kind, progress: Progress) -> Observed:
    contents = Contents(
        plan.due + _LIVE_ROWS, plan.params_bytes, plan.due, due_in_seconds=plan.after_seconds
    )
    sweeping = progress.add_task(f"{kind}: expired", total=plan.due)
    with serve(kind, contents) as server:
        return asyncio.run(
            _watch(plan, server, lambda done: progress.update(sweeping, completed=done))
        )


async def _watch(plan: Plan, server: Server, told: Callable[[int], None]) -> Observed:
    observed = Observed()
    await _turns(plan, server, seed=0)  # warms up
    clock = asyncio.get_running_loop().time
    seed = expired = 0
    began = clock()
    while expired < plan.due:
        seed += 1
        expired_before = expired
        one = await _turns(plan, server, seed)
        expired = await asyncio.to_thread(_expired, server)
        told(expired)
        if expired == 0:
            observed.before.extend(one.take)
            began = clock()
        elif 0 < expired_before and expired < plan.due:  # all of it during the sweep
            observed.during.extend(one.take)
    observed.sweep_seconds = clock() - began
    return observed


async def _turns(plan: Plan, server: Server, seed: int) -> Measured:
    return await load.run(
        server.port,
        conversations=_LIVE_ROWS,
        params=b"p" * plan.params_bytes,
        concurrency=plan.concurrency,
        seconds=_SLICE_SECONDS,
        seed=seed,
    )


def _expired(server: Server) -> int:
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    with urllib.request.urlopen(url) as page:
        for line in page.read().decode().splitlines():
            if line.startswith(_EXPIRED):
                return int(float(line.split()[-1]))
    return 0
