"""One router process from its settings to its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator

import structlog

from services.common import event_loop
from services.common.process import reload_on_hangup, run_until_signal, setup_logging
from services.router import app
from services.router.keys import BadKeysError
from services.router.settings import RouterSettings

_log = structlog.get_logger(__name__)

Ready = Callable[[app.Router], None]
"""Told once the router serves."""


def run(settings: RouterSettings, serving: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `serving(stop)` until SIGTERM or SIGINT, and exit the process."""
    setup_logging(level=settings.log_level, json=settings.log_json)
    failure: str | None = None
    try:
        event_loop.run(run_until_signal(serving))
    except* (OSError, BadKeysError) as errors:  # no defects of ours: no traceback
        failure = "; ".join(str(error) for error in _leaves(errors))
    sys.exit(failure)


def _leaves(errors: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def serve(
    settings: RouterSettings, stop: asyncio.Event, ready: Ready, place: app.Place | None = None
) -> None:
    """Serve turns until `stop` is set; if that is before it serves, give the start up.

    Args:
        settings: the router's settings.
        stop: set when it shall leave.
        ready: told once it serves.
        place: among the processes that share its ports; None: it is alone.
    """
    serving = False

    async def live() -> None:
        nonlocal serving
        async with app.build(settings, place=place) as router:
            serving = True
            with reload_on_hangup(router.reload):
                ready(router)
                await stop.wait()
            _log.info("router_stopping", grace_seconds=settings.shutdown_grace_seconds)

    async with asyncio.TaskGroup() as tasks:
        living = tasks.create_task(live(), name="router")
        await stop.wait()
        if not serving:
            _log.info("router_start_given_up")
            living.cancel()
