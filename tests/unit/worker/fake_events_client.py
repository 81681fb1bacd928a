"""The engine's end of the event socket, as the connector speaks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from services.worker.event_messages import Message
from tests.unit.worker.fakes import finished, hello


class FakeEventsClient:
    """A connector's connection. Made by `connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, message: Message) -> None:
        """Send one message as a line."""
        await self.send_raw(msgspec.json.encode(message) + b"\n")

    async def send_raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def finish(self, turn_id: str, **changes: Any) -> None:
        """Report a finished turn."""
        await self.send(finished(turn_id, **changes))

    async def release(self) -> list[str]:
        """Request ids of the next release line."""
        line = json.loads(await self._reader.readline())
        assert line["type"] == "release"
        released: list[str] = line["request_ids"]
        return released

    async def renew(self) -> list[list[Any]]:
        """Request ids and seconds of the next renew line."""
        line = json.loads(await self._reader.readline())
        assert line["type"] == "renew"
        leases: list[list[Any]] = line["pins"]
        return leases

    async def at_end(self) -> bool:
        """True if the sidecar has closed the connection."""
        return await self._reader.read() == b""


@asynccontextmanager
async def connect(path: Path, **changes: Any) -> AsyncIterator[FakeEventsClient]:
    """Connect and say hello; `changes` differ from a decode engine's hello."""
    async with connect_silently(path) as client:
        await client.send(hello(**changes))
        yield client


@asynccontextmanager
async def connect_silently(path: Path) -> AsyncIterator[FakeEventsClient]:
    """Connect without saying hello."""
    reader, writer = await asyncio.open_unix_connection(path, limit=64 * 1024 * 1024)
    try:
        yield FakeEventsClient(reader, writer)
    finally:
        writer.close()
