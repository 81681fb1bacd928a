"""Time as a parameter."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A clock that tests can replace."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds."""


class SystemClock:
    """This machine's clock."""

    def monotonic(self) -> float:
        """Seconds of the system's monotonic clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)
