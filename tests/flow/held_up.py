"""How long a busy machine has kept the tests' process from running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.worker.tasks import background_tasks

_TICK_SECONDS = 0.05
_NOTICED_SECONDS = 0.25
"""What is shorter is as likely the doing of what runs here."""


class HeldUp:
    """Counts the seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        """Count until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            late = clock() - due
            if late > _NOTICED_SECONDS:
                self.seconds += late


@asynccontextmanager
async def held_up() -> AsyncIterator[HeldUp]:
    """Count while the block runs."""
    counted = HeldUp()
    async with background_tasks() as tasks:
        tasks.start(counted.watch(), name="held up")
        yield counted
