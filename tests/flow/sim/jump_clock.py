"""Time that passes as always, and jumps when a test says so."""

from __future__ import annotations

import asyncio
import time


class JumpClock:
    """A clock for engines in the test's own process.

    Durations under test are a minute or more, so that nothing depends on how
    fast the test runs.
    """

    def __init__(self) -> None:
        self._ahead = 0.0
        self._jumped = asyncio.Condition()

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic() + self._ahead

    async def sleep(self, seconds: float) -> None:
        """Return when the time has come, by waiting or by a jump."""
        until = self.monotonic() + seconds
        while (left := until - self.monotonic()) > 0:
            try:
                async with asyncio.timeout(left), self._jumped:
                    # It may have jumped while this waited for its turn.
                    await self._jumped.wait_for(lambda: self.monotonic() >= until)
            except TimeoutError:
                return
        await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Jump."""
        async with self._jumped:
            self._ahead += seconds
            self._jumped.notify_all()
