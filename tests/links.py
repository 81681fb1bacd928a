"""TCP relays in front of servers, with which tests disturb connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Self

from tests.free_ports import held_ports

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Ends]]
Passing = Callable[[bytes], AsyncIterator[bytes]]
"""What becomes of a piece that one side says: what it yields goes to the other."""

_LOOPBACK = "127.0.0.1"


def to_port(port: int) -> Connect:
    """The way to a server on loopback."""
    return partial(asyncio.open_connection, _LOOPBACK, port)


class Link:
    """A relay whose connections a test can cut. It listens on a port of loopback.

    Subclasses may change what passes.

    Args:
        connect: opens a connection to the server behind it.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks = asyncio.TaskGroup()
        self._server: asyncio.Server | None = None
        self._hold = ExitStack()
        self.port = 0

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self.port = self._hold.enter_context(held_ports())
        self._server = await asyncio.start_server(self._accept, _LOOPBACK, self.port)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cut()
        await self._tasks.__aexit__(None, None, None)
        self._hold.close()

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    def passing(self) -> tuple[Passing, Passing]:
        """What passes on a new connection: to the server, and back."""
        return _unchanged, _unchanged

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.create_task(self._relay(reader, writer), name="link")

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = self.passing()
        try:
            far_reader, far_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pass_on(reader, far_writer, there))
                tasks.create_task(_pass_on(far_reader, writer, back))
        finally:
            self._writers -= both


async def _unchanged(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: Passing
) -> None:
    try:
        while data := await reader.read(65536):
            async for piece in passing(data):
                writer.write(piece)
                await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
