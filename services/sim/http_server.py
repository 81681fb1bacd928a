"""An HTTP server whose listener and connections can be cut off like a dying process's.

uvicorn's own main loop is not used: it takes over the process's signals, wakes
up ten times a second per server, and ends politely. Hundreds of these share one
event loop and cost nothing while idle.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

_LAST_WORDS_SECONDS = 1.0


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to an address; port 0 takes a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # Without the protocol asyncio leaves Nagle's algorithm on.
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise OSError(
            error.errno, f"cannot listen on {host} port {port}: {error.strerror}"
        ) from error
    return bound


class HttpServer:
    """Serves one ASGI application.

    Args:
        app: the application.
    """

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=4096,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._server.servers = []

    async def open(self, listener: socket.socket) -> None:
        """Take connections; also again after `close_listener`."""
        await self._server.startup(sockets=[listener])

    def close_listener(self) -> None:
        """Take no new connections. Those that are open go on."""
        for server in self._server.servers:
            server.close()
        self._server.servers = []

    def close_idle(self) -> None:
        """Close connections that wait for a request; the others after their reply."""
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    def hang_up(self, client: tuple[str, int]) -> None:
        """Close the connection from a client's address, once what was written is sent."""
        for connection in list(self._server.server_state.connections):
            if connection.transport.get_extra_info("peername")[:2] == client:
                connection.transport.close()

    async def end(self) -> None:
        """Cut everything off, and wait until the application has noticed."""
        self.close_listener()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        tasks = set(self._server.server_state.tasks)
        if not tasks:
            return
        _, stubborn = await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)
        for task in stubborn:
            task.cancel()
        await asyncio.gather(*stubborn, return_exceptions=True)
