"""The way to an engine, on which a test can hold a turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from kvloop.stack.ports import LOOPBACK
from tests.links import Link, Passing, to_port

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


class EngineLink(Link):
    """A relay in front of an engine's HTTP server.

    What is held is passed on in the end, whether or not the sidecar that sent it
    lives by then: a network does the same.

    Args:
        target_port: loopback port of the engine.
    """

    def __init__(self, target_port: int) -> None:
        super().__init__(to_port(target_port))
        self._awaited: deque[Hold] = deque()

    @property
    def url(self) -> str:
        """Where the engine seems to be."""
        return f"http://{LOOPBACK}:{self.port}"

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

    def passing(self) -> tuple[Passing, Passing]:
        """Everything; what is to be held, later."""
        connection = _Connection(self._awaited)
        return connection.requests, connection.replies


class _Connection:
    """One connection; turns follow one another on it."""

    def __init__(self, awaited: deque[Hold]) -> None:
        self._awaited = awaited
        self._hold: Hold | None = None
        """Of the reply to come."""
        self._passed = 0

    async def requests(self, data: bytes) -> AsyncIterator[bytes]:
        """From the sidecar to the engine."""
        if data.startswith(_TURN):
            await self._meet()
        yield data

    async def _meet(self) -> None:
        self._hold = None
        if not self._awaited:
            return
        hold = self._awaited.popleft()
        if hold.events == REQUEST:
            await hold.pause()
        else:
            self._hold, self._passed = hold, 0

    async def replies(self, data: bytes) -> AsyncIterator[bytes]:
        """From the engine to the sidecar."""
        if (hold := self._hold) is not None:
            at = _start_of_event(data, hold.events - self._passed) if hold.events else 0
            self._passed += data.count(_EVENT)
            if at >= 0:
                yield data[:at]
                await hold.pause()
                self._hold, data = None, data[at:]
        yield data


def _start_of_event(data: bytes, number: int) -> int:
    """Where the event of that number, from 0, starts; -1 if it is further on."""
    at = -1
    for _ in range(number + 1):
        at = data.find(_EVENT, at + 1)
        if at < 0:
            break
    return at
