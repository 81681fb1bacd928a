"""`python -m services.worker`: settings, logging, signals."""

from __future__ import annotations

import asyncio
import sys

import structlog

from services.common import grpc_core  # noqa: F401, which comes before gRPC
from services.common.process import (
    load_settings,
    reload_on_hangup,
    run_service,
    setup_logging,
)
from services.worker import app
from services.worker.settings import WorkerSettings

_log = structlog.get_logger(__name__)


async def _run(settings: WorkerSettings) -> None:
    async with app.build(settings) as worker:
        _log.info(
            "worker_serving",
            worker_id=settings.worker_id,
            role=settings.role,
            port=worker.port,
            address=worker.address,
        )
        try:
            with reload_on_hangup(worker.reload):
                await asyncio.Event().wait()
        finally:
            _log.info("worker_stopping", grace_seconds=settings.grace_seconds)


async def _serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Run until told to stop, also while the engine is still loading."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_run(settings), name="worker")
        await stop.wait()
        running.cancel()


def main() -> int:
    """Run a sidecar until SIGTERM or SIGINT; return the exit status.

    1: the engine or kvmeta made going on pointless; the log says why. A
    supervisor may start the sidecar again. 2: the settings are wrong.
    """
    settings = load_settings(WorkerSettings)
    setup_logging(level=settings.log_level, json=settings.log_json)
    return run_service("worker", lambda stop: _serve(settings, stop))


if __name__ == "__main__":
    sys.exit(main())
