"""Finds processes that outlived the one that started them.

A child of the stack may start children in sessions of their own (an engine and
its workers), which no process group reaches once their parent was killed. They
all inherit a variable of the environment, by which they are found in /proc.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

MARKER = "KVLOOP_STACK_PROCESS"


def find_leftovers(mark: str) -> list[int]:
    """Ids of this machine's processes whose MARKER variable is `mark`."""
    wanted = f"{MARKER}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # ended meanwhile, or another user's
            continue
        if wanted in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def kill_leftovers(mark: str) -> list[int]:
    """Kill them; returns their ids. Those they fork meanwhile are killed too."""
    killed: list[int] = []
    while pids := [pid for pid in find_leftovers(mark) if pid not in killed]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed += pids
    return killed
