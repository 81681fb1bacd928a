"""Makes the KV of an engine slow to read."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WORKER = b"VLLM::Worker"
"""vLLM's name for the processes that hold the KV."""


@contextmanager
def halted_workers(engine_pid: int) -> Iterator[None]:
    """While the block runs, the engine computes nothing, and no read of its KV goes on.

    That is so over TCP, where the process that holds the KV takes part in reads.

    Args:
        engine_pid: ancestor of the engine's processes.
    """
    workers = [pid for pid in _descendants(engine_pid) if _command(pid).startswith(_WORKER)]
    assert workers, "the engine has no workers"
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _descendants(child)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
