"""`python -m services.router`: settings, and one process or several."""

from __future__ import annotations

import asyncio

import structlog

from services.common import grpc_core  # noqa: F401, which comes before gRPC
from services.common.process import load_settings
from services.router import app, processes
from services.router.serving import run, serve
from services.router.settings import RouterSettings

_log = structlog.get_logger(__name__)


def main() -> None:
    """Run a router until SIGTERM or SIGINT."""
    settings = load_settings(RouterSettings)

    def ready(router: app.Router) -> None:
        _log.info(
            "router_serving",
            listen=settings.listen,
            port=router.port,
            kvmeta=settings.kvmeta,
            gateway_listen=settings.gateway_listen,
            gateway_port=router.gateway_port,
            metrics_port=router.metrics_port,
        )

    async def serving(stop: asyncio.Event) -> None:
        if settings.processes > 1:
            await processes.serve_all(settings, stop)
        else:
            await serve(settings, stop, ready)

    run(settings, serving)


if __name__ == "__main__":
    main()
