"""`python -m services.router`: settings, logging, signals."""

from __future__ import annotations

import asyncio
import sys

import structlog

from services.common import event_loop
from services.common.process import (
    load_settings,
    reload_on_hangup,
    run_until_signal,
    setup_logging,
)
from services.router import app
from services.router.keys import BadKeysError
from services.router.settings import RouterSettings

_log = structlog.get_logger(__name__)


async def _serve(settings: RouterSettings, stop: asyncio.Event) -> None:
    async with app.build(settings) as router:
        _log.info(
            "router_serving",
            listen=settings.listen,
            port=router.port,
            kvmeta=settings.kvmeta,
            gateway_listen=settings.gateway_listen,
            gateway_port=router.gateway_port,
            metrics_port=router.metrics_port,
        )
        with reload_on_hangup(router.reload):
            await stop.wait()
        _log.info("router_stopping", grace_seconds=settings.shutdown_grace_seconds)


def main() -> None:
    """Run a router until SIGTERM or SIGINT."""
    settings = load_settings(RouterSettings)
    setup_logging(level=settings.log_level, json=settings.log_json)
    failure: str | None = None
    try:
        event_loop.run(run_until_signal(lambda stop: _serve(settings, stop)))
    except* (OSError, BadKeysError) as errors:  # no defects of ours: no traceback
        failure = "; ".join(str(error) for error in errors.exceptions)
    sys.exit(failure)


if __name__ == "__main__":
    main()
