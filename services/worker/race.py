"""Waiting for whichever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from services.worker.clock import Clock
from services.worker.tasks import background_tasks


async def race(*contestants: Coroutine[Any, Any, object]) -> int:
    """Run all until one returns; the others are cancelled.

    Returns:
        Place of the first that returned.

    Raises:
        Exception: what a contestant raised.
    """
    async with background_tasks() as tasks:
        running = [tasks.start(contestant, name="contestant") for contestant in contestants]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return next(index for index, task in enumerate(running) if task.done())


async def wait_or_sleep(event: asyncio.Event, clock: Clock, seconds: float | None) -> None:
    """Return when the event is set or the time is over; None: no time limit."""
    if seconds is None:
        await event.wait()
    else:
        await race(event.wait(), clock.sleep(seconds))
