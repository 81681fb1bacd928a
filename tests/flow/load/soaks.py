"""Why a soak has failed, for the message of its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.soak.report import Report

_LINES = 30


def explained(report: Report, logs: Path) -> str:
    """What does not hold, examples, and the ends of the logs that this names.

    Args:
        report: of the soak.
        logs: folder with the logs of its processes.
    """
    return "\n".join(_explanation(report, logs))


def _explanation(report: Report, logs: Path) -> Iterator[str]:
    wrong = [verdict.what for verdict in report.verdicts if not verdict.holds]
    yield from wrong
    yield from report.tally.examples
    yield f"errors that were not called for: {dict(report.tally.unexcused)}"
    yield f"killed: {report.kills}; {report.seconds:.0f} s, then {report.settled_seconds:.0f} s"
    for log in sorted(logs.glob("*.log")):
        if any(log.stem in what for what in wrong):
            yield f"the end of {log.name}:"
            yield from log.read_text(errors="replace").splitlines()[-_LINES:]
