"""Tells those who watch the router's health whether it can serve turns."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from services.common.rpc_health import Health
from services.router.workers import WorkerPool


async def tell_readiness(pool: WorkerPool, changed: asyncio.Event, health: Health) -> NoReturn:
    """Keep health in step with the pool until cancelled.

    Args:
        pool: knows whether there are workers.
        changed: set by the pool when that may be another matter now.
        health: what is told.
    """
    while True:
        changed.clear()
        health.set_ready(pool.can_serve)
        try:
            async with asyncio.timeout(pool.forgets_in):
                await changed.wait()
        except TimeoutError:
            continue  # the pool forgets when it is asked
