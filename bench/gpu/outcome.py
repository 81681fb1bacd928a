"""What a part found: shown at its end, and written as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.gpu.added import COMPARISONS, added
from bench.gpu.checks import Check
from bench.gpu.hops import Row, breakdown, sum_of_medians
from bench.gpu.host import busy_cores, cpu_seconds, machine
from bench.gpu.observed import Book
from bench.gpu.reuse import missed_notes
from kvloop.bench.cells import cells
from kvloop.bench.files import cell_record, sample_records
from kvloop.bench.outputs import OutputCheck
from kvloop.bench.samples import Run

_SPANS_SECONDS = 6.0
"""How long spans may be on their way."""
_COLUMNS = 4
"""Breakdowns that fit on a line."""


class HostWatch:
    """How busy the machine was between two looks.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen, self._at = cpu_seconds(), clock()

    def look(self) -> dict[str, Any]:
        """The time since the last look."""
        seen, now = cpu_seconds(), self._clock()
        seconds = max(now - self._at, 1e-3)
        told = {**machine(), "seconds": seconds, "cores": busy_cores(self._seen, seen, seconds)}
        self._seen, self._at = seen, now
        return told


@dataclass
class Outcome:
    """What a part found.

    Attributes:
        remarks: what has to be known of the runs; comes first in the notes.
        book: what was seen of single turns.
        host: looks at the machine after each run; None: nobody does.
        kept: called after each run, so that nothing is lost if the next one never ends.
    """

    runs: dict[str, Run] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    outputs: dict[str, list[OutputCheck]] = field(default_factory=dict)
    traffic: dict[str, dict[str, Any]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    breakdowns: dict[str, list[Row]] = field(default_factory=dict)
    conditions: dict[str, dict[str, Any]] = field(default_factory=dict)
    book: Book = field(default_factory=Book)
    host: HostWatch | None = None
    kept: Callable[[Outcome], None] = lambda outcome: None

    def keep(self, name: str, run: Run) -> None:
        """Take a run that has ended."""
        self.runs[name] = run
        if self.host is not None:
            self.conditions[name] = self.host.look()
        self._compare()
        self.kept(self)

    async def finish(self) -> None:
        """Compare once more, when the last spans have come."""
        await self.book.complete(at_most_seconds=_SPANS_SECONDS)
        self._compare()

    def _compare(self) -> None:
        """Turns that did not reuse, and what kvloop adds to the bare protocol beside it."""
        self.notes = list(self.remarks)
        for name, run in self.runs.items():
            said = [*missed_notes(run), *added(run, self.book.traced)]
            self.notes += [f"{name}: {sentence}" for sentence in said]
            for compared in filter(lambda one: one.has_legs, COMPARISONS):
                if rows := breakdown(run, compared, self.book):
                    title = f"{name} {compared.way}, {compared.bare}"
                    self.breakdowns[title] = rows

    def columns(self) -> Iterator[dict[str, Sequence[Row]]]:
        """The breakdowns, so many at a time as fit on a line."""
        names = list(self.breakdowns)
        for at in range(0, len(names), _COLUMNS):
            yield {name: self.breakdowns[name] for name in names[at : at + _COLUMNS]}

    def records(self) -> dict[str, Any]:
        """All of it, for a file."""
        found = {name: cells(run) for name, run in self.runs.items()}
        return {
            "cells": {name: [cell_record(c, of) for c in of] for name, of in found.items()},
            "notes": self.notes,
            "checks": [asdict(check) for check in self.checks],
            "outputs": {name: [asdict(c) for c in checks] for name, checks in self.outputs.items()},
            "traffic": self.traffic,
            "breakdowns": {
                name: {"sum_of_medians": sum_of_medians(rows), "rows": [asdict(r) for r in rows]}
                for name, rows in self.breakdowns.items()
            },
            "conditions": self.conditions,
            "samples": {name: sample_records(run) for name, run in self.runs.items()},
            "observed": self.book.records(),
        }
