"""`python -m services.kvmeta`: settings, logging, signals."""

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
from services.kvmeta import app
from services.kvmeta.settings import KvmetaSettings

_log = structlog.get_logger(__name__)


async def _serve(settings: KvmetaSettings, stop: asyncio.Event) -> None:
    async with app.build(settings) as kvmeta:
        _log.info(
            "kvmeta_serving",
            listen=settings.listen,
            port=kvmeta.port,
            metrics_port=kvmeta.metrics_port,
        )
        with reload_on_hangup(kvmeta.reload):
            await stop.wait()
        _log.info("kvmeta_stopping", grace_seconds=settings.shutdown_grace_seconds)


def main() -> int:
    """Run kvmeta until SIGTERM or SIGINT; return the exit status.

    1: the database or the address made starting pointless; the log says why.
    2: the settings are wrong.
    """
    settings = load_settings(KvmetaSettings)
    setup_logging(level=settings.log_level, json=settings.log_json)
    return run_service("kvmeta", lambda stop: _serve(settings, stop))


if __name__ == "__main__":
    sys.exit(main())
