"""Numbers as people read them, and the machine that they come from."""

from __future__ import annotations

import datetime
import os
import platform
import sqlite3
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.contract.postgres_server import find_binaries

console = Console(width=120)


def describe_machine() -> None:
    """Print what the figures depend on."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    console.print(
        f"{datetime.date.today()}, {cpu}, {os.cpu_count()} cores for clients and servers, "
        f"load {os.getloadavg()[0]:.1f} at the start; Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}, {_postgres_version()}"
    )


def percentile(values: Sequence[float], of: int) -> float:
    """The value that `of` percent of them do not exceed; nan if there are none."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100)[of - 1]


def milliseconds(seconds: Sequence[float]) -> str:
    """The 50th, 95th and 99th percentile in ms."""
    return " / ".join(f"{percentile(seconds, of) * 1000:.1f}" for of in (50, 95, 99))


def spread(values: Sequence[float], digits: int) -> str:
    """The median, and the least and the most."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"


def _postgres_version() -> str:
    binaries = find_binaries()
    if binaries is None:
        return "no PostgreSQL"
    told = subprocess.run([binaries / "postgres", "--version"], capture_output=True, text=True)
    return told.stdout.strip()
