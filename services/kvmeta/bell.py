"""Wakes whoever waits in this process for a change of the store."""

from __future__ import annotations

import asyncio
import contextlib


class Bell:
    """Tells waiting watchers to look again.

    A watcher calls `listen` before it looks, so that no ring is lost between
    looking and waiting. Changes of other processes ring no bell here; the limit
    of `wait` finds them.
    """

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake everyone who listens now."""
        self._rung.set()
        self._rung = asyncio.Event()

    def listen(self) -> asyncio.Event:
        """What the next ring will set."""
        return self._rung


async def wait(rung: asyncio.Event, limit_seconds: float) -> None:
    """Return when the bell has rung, or after the limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_seconds):
            await rung.wait()
