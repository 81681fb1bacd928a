"""Ctrl-C and its relatives: the first asks, the second insists."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """What happened so far.

    Attributes:
        count: signals received.
    """

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def cancel_on_signal(insist: Callable[[], None]) -> Iterator[Interrupts]:
    """Cancel the current task on the first signal, call `insist` on each later one.

    For asyncio's main thread. Which of SIGINT, SIGTERM and SIGHUP it was makes no
    difference.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None  # this is called from a coroutine
    interrupts = Interrupts()

    def handle() -> None:
        interrupts.count += 1
        if interrupts.count == 1:
            task.cancel()
        else:
            insist()

    for signum in _SIGNALS:
        loop.add_signal_handler(signum, handle)
    try:
        yield interrupts
    finally:
        for signum in _SIGNALS:
            loop.remove_signal_handler(signum)
