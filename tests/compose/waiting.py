"""Waits for conditions outside of this process, which tell nobody when they come true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_PAUSE_SECONDS = 0.5


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Look until the condition holds; False if it never did in that time."""
    deadline = time.monotonic() + seconds
    while True:
        if condition():
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_SECONDS)


async def until_async(
    condition: Callable[[], Awaitable[bool]], seconds: float, pause_seconds: float = _PAUSE_SECONDS
) -> bool:
    """Look until the condition holds; False if it never did in that time."""
    deadline = time.monotonic() + seconds
    while True:
        if await condition():
            return True
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(pause_seconds)
