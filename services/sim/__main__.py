"""`python -m services.sim`: settings, logging, signals."""

from __future__ import annotations

import asyncio
import sys

import structlog
import uvloop

from services.common.process import load_settings, run_until_signal, setup_logging
from services.sim import app
from services.sim.settings import SimSettings
from services.worker.race import race

_log = structlog.get_logger(__name__)


async def _serve(settings: SimSettings, stop: asyncio.Event) -> int:
    """Run until told to stop (0) or until all engines are down (1)."""
    async with app.build(settings) as process:
        _log.info(
            "sim_serving",
            role=settings.role,
            engines=settings.engines,
            port=process.hosts[0].spec.port,
            preset=settings.preset,
            model=settings.served_model_name,
        )
        if settings.admin_listen is not None:
            await stop.wait()
            return 0
        return await race(stop.wait(), process.all_down())


def main() -> int:
    """Run engines until SIGTERM or SIGINT; return the exit status.

    1: a port is taken, or all engines have ended as a fault demanded. 2: the
    settings are wrong.
    """
    settings = load_settings(SimSettings)
    setup_logging(level=settings.log_level, json=settings.log_json)
    status = 0

    async def serve(stop: asyncio.Event) -> None:
        nonlocal status
        status = await _serve(settings, stop)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_until_signal(serve))
    except OSError as error:
        _log.error("sim_failed", error=str(error))
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
