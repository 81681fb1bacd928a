"""A network between two services that a test can cut, stop and mend."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

from tests.free_ports import held_ports

_PIECE_BYTES = 64 * 1024


class Link:
    """A TCP relay in front of a server. Its port stays the same through cuts.

    Args:
        target_port: port of the server; may be changed while the link is cut.
    """

    def __init__(self, target_port: int = 0) -> None:
        self.target_port = target_port
        self.port = 0
        self._hold = ExitStack()
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self._requests, self._replies = asyncio.Event(), asyncio.Event()

    @property
    def works(self) -> bool:
        """Whether it is neither cut nor stopped."""
        return self._server is not None and self._requests.is_set() and self._replies.is_set()

    async def __aenter__(self) -> Link:
        self.port = self._hold.enter_context(held_ports())
        await self.mend()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cut()
        # A connection that was just made is not among its ends yet.
        await asyncio.gather(*self._relays)
        self._hold.close()

    @property
    def address(self) -> str:
        """Where clients of the server find it."""
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break every connection and refuse new ones, as when the server is killed."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()

    def hang(self) -> None:
        """Pass nothing on, as when the server is stopped."""
        self._requests.clear()
        self._replies.clear()

    def lose_replies(self) -> None:
        """Pass requests on, but no replies."""
        self._replies.clear()

    def resume(self) -> None:
        """Pass everything on again, what was held back first."""
        self._requests.set()
        self._replies.set()

    async def mend(self) -> None:
        """Work again, on new connections."""
        self.cut()
        self.resume()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.get_running_loop().create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        if self._server is None:  # cut meanwhile
            writer.transport.abort()
            far_writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._ends |= ends
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_copy(reader, far_writer, self._requests))
            tasks.create_task(_copy(far_reader, writer, self._replies))
        self._ends -= ends
        for end in ends:
            with suppress(ConnectionError):
                await end.wait_closed()


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passable: asyncio.Event
) -> None:
    try:
        with suppress(ConnectionError):
            while data := await reader.read(_PIECE_BYTES):
                while not (passable.is_set() or writer.transport.is_closing()):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await passable.wait()
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()
