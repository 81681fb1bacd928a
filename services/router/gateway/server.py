"""Builds the gateway and serves it in the router's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloop.common.v1 import common_pb2
from services.common.shared_ports import listening_socket
from services.common.tls import ServerTls
from services.router.gateway.pages import Pages, http_error
from services.router.gateway.protocol import with_head_limits
from services.router.gateway.turns import TurnEndpoint

TURN_PATHS = {
    "/v1/chat/completions": common_pb2.API_CHAT_COMPLETIONS,
    "/v1/completions": common_pb2.API_COMPLETIONS,
    "/v1/responses": common_pb2.API_RESPONSES,
}
"""Endpoints that run turns, and the format of their bodies."""
MAX_HEAD_BYTES = 64 * 1024
"""Largest head of a request: its target with all names and values of headers, and
four bytes for each header. A head that has no end is given up after as many bytes,
whatever they are; those that come in one read with an earlier body are not counted."""
_ANY = ["GET", "POST", "DELETE"]
_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
"""How long idle connections are kept: longer than the usual 60 s of load
balancers, which would else send a request on a connection that is closing."""


def build_app(
    turns: Mapping[str, TurnEndpoint], pages: Pages, more: Sequence[Route] = ()
) -> ASGIApp:
    """The routes of the gateway.

    Args:
        turns: endpoints that run turns, by their path.
        pages: the rest of the API.
        more: what is served besides it.
    """
    rest = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in turns.items()),
            Route("/v1/responses/{rest:path}", pages.kept_response, methods=_ANY),
            Route("/v1/models", pages.models, methods=["GET"]),
            Route("/tokenize", pages.tokenize, methods=["POST"]),
            Route("/health", pages.ready, methods=["GET"]),
            Route("/health/ready", pages.ready, methods=["GET"]),
            Route("/health/live", pages.live, methods=["GET"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
            *more,
        ],
        exception_handlers={HTTPException: http_error},
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Turns on the shortest way; the rest, and what is wrong, by the routes."""
        endpoint = turns.get(scope["path"]) if scope.get("method") == "POST" else None
        await (endpoint or rest)(scope, receive, send)

    return app


class _Server(uvicorn.Server):
    """A server that leaves signals to the process it is part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def serve(
    app: ASGIApp,
    address: str,
    tasks: asyncio.TaskGroup,
    *,
    grace_seconds: float,
    head_timeout_seconds: float,
    tls: ServerTls | None = None,
    share_port: bool = False,
) -> AsyncIterator[int]:
    """Serve an application while the block runs.

    At the end no new requests are taken, and those in flight get grace_seconds.

    Args:
        app: what to serve.
        address: host:port to listen on; port 0 takes a free one.
        tasks: owns the server.
        grace_seconds: time for requests in flight at the end.
        head_timeout_seconds: how long the head of a request may take, and a body
            whose request is already answered.
        tls: how to encrypt; without it nothing is.
        share_port: other processes listen on the same port.

    Yields:
        The port.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = listening_socket(address, backlog=_BACKLOG, shared=share_port)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = _Server(
        uvicorn.Config(
            app,
            http=with_head_limits(head_timeout_seconds, MAX_HEAD_BYTES),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(grace_seconds)),
            **(_encrypted(tls) if tls is not None else {}),
        )
    )
    port = listener.getsockname()[1]
    serving = tasks.create_task(server.serve(sockets=[listener]), name="gateway")
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110, it has no event
            await asyncio.sleep(0.005)
        yield port
    finally:
        server.should_exit = True
        await asyncio.wait([serving])


def _encrypted(tls: ServerTls) -> dict[str, Any]:
    """Settings that make the server use a context of ours."""
    return {
        "ssl_certfile": str(tls.certificate),
        "ssl_context_factory": lambda config, default: tls.ssl_context(),
    }
