"""What a run came to, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table

from bench.soak.leftovers import Look
from bench.soak.memory import Sample, Trend
from bench.soak.tally import Tally
from bench.soak.verdicts import Verdict


@dataclass
class Report:
    """One run.

    Attributes:
        title: what was run.
        conditions: how, in words.
        seconds: from the first turn to the last.
        tally: what clients saw.
        before: what was held before the load.
        after: what was held at the end.
        settled_seconds: from the last turn until nothing was held.
        trends: memory of the processes that lived throughout.
        samples: memory of all that were watched.
        cpu: share of one core that each process took, by name.
        router: what routers have counted in their present lives.
        kills: by service and signal.
        verdicts: what has to hold.
    """

    title: str
    conditions: dict[str, str]
    tally: Tally
    before: Look
    after: Look = field(default_factory=Look)
    seconds: float = 0.0
    settled_seconds: float = 0.0
    trends: dict[str, Trend] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    router: dict[str, dict[str, float]] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all holds that has to."""
        return all(verdict.holds for verdict in self.verdicts)


def document(report: Report) -> bytes:
    """The report as JSON."""
    return msgspec.json.encode(report)


def show(report: Report, console: Console) -> None:
    """Print the report."""
    console.print(Group(*_parts(report)))
    for verdict in report.verdicts:
        mark = "[green]PASS[/]" if verdict.holds else "[red bold]FAIL[/]"
        console.print(f"{mark}  {verdict.what}", highlight=False)
    for example in report.tally.examples:
        console.print(f"      {example}", highlight=False, markup=False)


def _parts(report: Report) -> Iterator[RenderableType]:
    yield _table(report.title, report.conditions)
    tally = report.tally
    reused = tally.prompt_tokens.total() or 1
    yield _table(
        "turns",
        {
            "answered": f"{tally.turns:,} ({tally.turns / max(report.seconds, 1e-9):.1f}/s)",
            "tokens": f"{tally.tokens:,} ({tally.tokens / max(report.seconds, 1e-9):,.0f}/s)",
            "left by their client": tally.left,
            "sent again": tally.repeated,
            "slowest, repeats included": f"{tally.slowest_seconds:.1f} s",
            "with a receipt": tally.receipts,
            "of them pulled": f"{tally.hits} ({tally.hits / max(tally.receipts, 1):.1%})",
            **{f"  {reason}": count for reason, count in tally.misses.most_common()},
            **{
                f"prompt tokens {source}": f"{count:,} ({count / reused:.1%})"
                for source, count in tally.prompt_tokens.items()
            },
        },
    )
    for title, rows in (
        ("injected", tally.injected),
        ("errors that were called for", tally.excused),
        ("errors that were not", tally.unexcused),
        ("kills", report.kills),
    ):
        if rows:
            yield _table(title, dict(sorted(rows.items())))
    if report.router:
        yield _table("router", {k: _pairs(v) or "nothing" for k, v in report.router.items()})
    if report.cpu:
        yield _table("share of one core", {k: f"{v:.1%}" for k, v in report.cpu.items()})
    yield _memory(report.samples)
    yield _table(
        f"at rest, {report.settled_seconds:.0f} s after the last turn",
        {
            "held": _pairs(report.after.still_held) or "nothing",
            "conversations in the ledger": _pairs(report.after.rows) or "none",
            **{
                what: f"{report.before.standing.get(what, 0):g} before, {count:g} now"
                for what, count in report.after.standing.items()
            },
        },
    )


def _memory(samples: Mapping[str, Sequence[Sample]]) -> Table:
    made = Table(title="resident memory over time, MiB", title_justify="left")
    made.add_column("process")
    made.add_column("every tenth of the run", justify="right")
    for name, taken in samples.items():
        step = max(len(taken) // 10, 1)
        made.add_row(name, " ".join(f"{sample.mib:.0f}" for sample in taken[::step]))
    return made


def _table(title: str, rows: Mapping[str, object]) -> Table:
    made = Table(title=title, title_justify="left", show_header=False)
    made.add_column("what")
    made.add_column("how much", justify="right")
    for name, value in rows.items():
        made.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    return made


def _pairs(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {count:,.0f}" for name, count in counts.items())
