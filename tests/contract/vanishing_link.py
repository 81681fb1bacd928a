"""A connection whose other end can vanish without a word, as in a failover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


class VanishingLink:
    """A TCP relay to a Unix socket; made by `vanishing_link`."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._lives = 1
        self.port = 0

    def vanish(self) -> None:
        """Swallow from now on what connections of before say; new ones work."""
        self._lives += 1

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        life = self._lives
        far_reader, far_writer = await asyncio.open_unix_connection(self._target)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if life == self._lives:
                    sink.write(data)
            sink.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy(reader, far_writer))
            tasks.create_task(copy(far_reader, writer))


@asynccontextmanager
async def vanishing_link(target: Path) -> AsyncIterator[VanishingLink]:
    """A link to a Unix socket."""
    link = VanishingLink(target)
    server = await asyncio.start_server(link.relay, "127.0.0.1", 0)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
