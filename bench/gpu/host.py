"""What the machine is and how busy it was: kept beside times that depend on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_USER_TICKS, _SYSTEM_TICKS = 11, 12
"""Places in /proc/PID/stat, counted behind the command's name."""
_SHOWN = 12


def machine() -> dict[str, Any]:
    """CPUs, how many of them this process may use, and the kernel."""
    return {
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "kernel": " ".join(os.uname()[:3:2]),
        "load": _load(),
    }


def cpu_seconds(root: Path = Path("/proc")) -> dict[str, float]:
    """CPU time of every process so far, by its id and command.

    Args:
        root: where processes are listed.
    """
    found = {}
    for folder in root.glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            fields = rest.split()
            ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
        except (OSError, ValueError, IndexError):
            continue  # it has ended, or the kernel is one that does not tell
        command = _short(words) or name.partition("(")[2]
        found[f"{folder.name} {command}"] = ticks / _TICKS_PER_SECOND
    return found


def busy_cores(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Cores that each process used on average, the busiest first; idle ones are left out.

    Args:
        before: CPU seconds by process.
        after: the same, later.
        seconds: time between the two.
    """
    used = {name: (spent - before.get(name, 0.0)) / seconds for name, spent in after.items()}
    busiest = sorted(used.items(), key=lambda entry: -entry[1])[:_SHOWN]
    return {name: round(cores, 3) for name, cores in busiest if cores > 0.0005}


def _load() -> tuple[float, ...] | None:
    try:
        return os.getloadavg()
    except OSError:  # not told in every sandbox
        return None


def _short(words: list[str]) -> str:
    """A module or program, and what tells processes of one program apart."""
    told = [word for word in words if word.startswith(("services.", "vllm", "VLLM", "bench."))]
    roles = [word.partition("=")[2] for word in words if word.startswith("--worker-id=")]
    return " ".join([*(told[:1] or words[:1]), *roles])
