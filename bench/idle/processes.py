"""CPU time of an engine's processes, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_NAMES = {"EngineCore": "EngineCore", "Worker": "worker"}
"""Part of a vLLM process's title, and what the report calls it."""


def engine_processes(root: int) -> dict[str, int]:
    """EngineCore and workers among a process's descendants, by name."""
    found: dict[str, int] = {}
    for pid in _descendants(root):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        for part, name in _NAMES.items():
            if part in title:
                number = sum(known.startswith(name) for known in found)
                found[f"{name} {number}" if number else name] = pid
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        children.setdefault(parent, []).append(int(entry.name))
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        found.append(pid)
        pending += children.get(pid, [])
    return found
