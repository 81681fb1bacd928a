"""Runs one command whose processes must not outlive their keeper.

    python guard.py KEEPER_FD GRACE_SECONDS COMMAND [ARGUMENT...]

The keeper holds the other end of the pipe KEEPER_FD. When it closes it, or dies
in any way, the command's whole process group gets SIGTERM and, after
GRACE_SECONDS, SIGKILL; so do processes that left the group. When the command
ends by itself, the processes it left behind are killed, and its exit status is
passed on (128 + signal number if a signal ended it).

A process of its own, because nothing inside the keeper survives SIGKILL. Only
the standard library is used, so that it starts fast and under any interpreter.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    keeper_fd, grace_seconds, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    libc = ctypes.CDLL(None)
    # Orphaned grandchildren become our children, wherever they moved.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child_fd = _wake_on_child_exit()
    child = subprocess.Popen(
        command,
        process_group=0,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    while child.poll() is None:
        readable, _, _ = select.select([keeper_fd, child_fd], [], [])
        if keeper_fd in readable and not os.read(keeper_fd, 1):
            _signal_group(child.pid, signal.SIGTERM)
            _wait(child, grace_seconds)
            break
        if child_fd in readable:
            os.read(child_fd, 4096)
            _reap_adopted(child.pid)
    _kill_all(child)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _wake_on_child_exit() -> int:
    """A descriptor that becomes readable whenever a child has ended."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end


def _reap_adopted(child: int) -> None:
    for pid in _children():
        if pid != child:
            os.waitpid(pid, os.WNOHANG)


def _wait(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until the group is gone, or time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        child.poll()
        _reap_adopted(child.pid)  # a group counts as there until its dead are reaped
        if not _signal_group(child.pid, 0):
            return
        time.sleep(_POLL_SECONDS)


def _kill_all(child: subprocess.Popen[bytes]) -> None:
    """Kill the group and whatever else descends from us, until nothing is left."""
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()
    while pids := _children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _signal_group(group: int, signum: int) -> bool:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    return True


def _children() -> list[int]:
    return [
        int(pid)
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text().split()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
