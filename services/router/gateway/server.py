"""Builds the gateway and serves it in the router's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from kvloop.common.v1 import common_pb2
from services.common.addresses import split_host_port
from services.common.tls import ServerTls
from services.router.gateway.pages import Pages, http_error
from services.router.gateway.protocol import with_head_timeout
from services.router.gateway.turns import TurnEndpoint

TURN_PATHS = {
    "/v1/chat/completions": common_pb2.API_CHAT_COMPLETIONS,
    "/v1/completions": common_pb2.API_COMPLETIONS,
    "/v1/responses": common_pb2.API_RESPONSES,
}
"""Endpoints that run turns, and the format of their bodies."""
MAX_HEAD_BYTES = 64 * 1024
"""Largest request line with headers."""
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
    return Starlette(
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
) -> AsyncIterator[int]:
    """Serve an application while the block runs.

    At the end no new requests are taken, and those in flight get grace_seconds.

    Args:
        app: what to serve.
        address: host:port to listen on; port 0 takes a free one.
        tasks: owns the server.
        grace_seconds: time for requests in flight at the end.
        head_timeout_seconds: how long the head of a request may take.
        tls: how to encrypt; without it nothing is.

    Yields:
        The port.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = _listen(address)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = _Server(
        uvicorn.Config(
            app,
            http=with_head_timeout(head_timeout_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(grace_seconds)),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
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


def _listen(address: str) -> socket.socket:
    host, port = split_host_port(address)
    try:
        family, kind, protocol, _, resolved = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Without the protocol asyncio does not take it for TCP, and leaves Nagle's
        # algorithm on: small chunks then wait 40 ms for an acknowledgement.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(resolved)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    return listener
