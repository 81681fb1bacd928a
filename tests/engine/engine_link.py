"""The way to an engine, on which a test can hold a turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from kvloop.stack.ports import LOOPBACK

_TURN = b"POST /v1/completions"
_EVENT = b"data: "
REQUEST = -1
"""Of `EngineLink.hold`: the request itself is held, and the engine sees nothing."""
_REACHED_SECONDS = 60.0


class Hold:
    """One turn that is, or will be, held. Made by `EngineLink.hold`."""

    def __init__(self, events: int) -> None:
        self.events = events
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def reached(self) -> None:
        """Wait until a turn is held."""
        async with asyncio.timeout(_REACHED_SECONDS):
            await self._reached.wait()

    def release(self) -> None:
        """Let it go on."""
        self._released.set()

    async def pause(self) -> None:
        """Be held."""
        self._reached.set()
        await self._released.wait()


class EngineLink:
    """A TCP relay in front of an engine's HTTP server.

    What is held is passed on in the end, whether or not the sidecar that sent it
    lives by then: a network does the same.

    Args:
        target_port: loopback port of the engine.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._awaited: deque[Hold] = deque()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks = asyncio.TaskGroup()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> EngineLink:
        await self._tasks.__aenter__()
        self._server = await asyncio.start_server(self._accept, LOOPBACK, 0)
        self.url = f"http://{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._tasks.__aexit__(None, None, None)

    @contextmanager
    def hold(self, events: int = REQUEST) -> Iterator[Hold]:
        """Hold the next turn; it goes on when the block ends, or is told to.

        Args:
            events: how many events of its stream pass before the rest is held; 0: the
                whole reply is held; REQUEST: the request is.
        """
        hold = Hold(events)
        self._awaited.append(hold)
        try:
            yield hold
        finally:
            hold.release()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.create_task(self._relay(reader, writer), name="engine link")

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._target_port)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(self._awaited)
        both = {writer, far_writer}
        self._writers |= both
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(connection.pass_requests(reader, far_writer))
                tasks.create_task(connection.pass_replies(far_reader, writer))
        finally:
            self._writers -= both


class _Connection:
    """One connection; turns follow one another on it."""

    def __init__(self, awaited: deque[Hold]) -> None:
        self._awaited = awaited
        self._hold: Hold | None = None
        """Of the reply to come."""
        self._passed = 0

    async def pass_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """From the sidecar to the engine."""
        try:
            while data := await reader.read(65536):
                if data.startswith(_TURN):
                    await self._meet()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _meet(self) -> None:
        self._hold = None
        if not self._awaited:
            return
        hold = self._awaited.popleft()
        if hold.events == REQUEST:
            await hold.pause()
        else:
            self._hold, self._passed = hold, 0

    async def pass_replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """From the engine to the sidecar."""
        try:
            while data := await reader.read(65536):
                if (hold := self._hold) is not None:
                    at = _start_of_event(data, hold.events - self._passed) if hold.events else 0
                    self._passed += data.count(_EVENT)
                    if at >= 0:
                        writer.write(data[:at])
                        await hold.pause()
                        self._hold, data = None, data[at:]
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


def _start_of_event(data: bytes, number: int) -> int:
    """Where the event of that number, from 0, starts; -1 if it is further on."""
    at = -1
    for _ in range(number + 1):
        at = data.find(_EVENT, at + 1)
        if at < 0:
            break
    return at
