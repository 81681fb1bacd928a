"""The simulated engine's connection to its sidecar breaks, and is made again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.sim.events import EventLink
from services.worker.clock import SystemClock
from services.worker.tasks import background_tasks

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _NoPins:
    def snapshot(self) -> dict[str, object]:
        return {"type": "pins", "pins": []}

    def release(self, request_ids: list[str]) -> None: ...

    def renew(self, leases: list[tuple[str, float]]) -> None: ...


async def test_both_directions_break_at_once_and_it_connects_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a sidecar is killed under load; the engine goes on."""
    breaking = asyncio.Event()

    async def broken(*_: object) -> None:
        await breaking.wait()
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(EventLink, "_send_all", broken)
    monkeypatch.setattr(EventLink, "_receive", broken)
    connected: asyncio.Queue[bytes] = asyncio.Queue()

    async def sidecar(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.put_nowait(await reader.readline())
        await reader.read()
        writer.close()

    path = str(tmp_path / "events.sock")
    async with await asyncio.start_unix_server(sidecar, path), background_tasks() as tasks:
        link = EventLink(path, {"type": "hello"}, _NoPins(), SystemClock(), tasks)
        tasks.start(link.run(), name="link")
        assert b"hello" in await connected.get()
        breaking.set()
        assert b"hello" in await connected.get()


async def test_it_connects_again_where_the_loop_finds_the_end_before_the_link_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop lets nobody write to a connection that has just broken."""

    def refuse(*_: object) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")

    async def breaks(self: EventLink, reader: asyncio.StreamReader) -> None:
        await reader.readline()
        (writer,) = writers
        monkeypatch.setattr(writer, "is_closing", lambda: True)
        monkeypatch.setattr(writer, "write", refuse)
        monkeypatch.setattr(EventLink, "_receive", received)
        self.send({"type": "pressure", "blocks_needed": 1})
        await asyncio.Event().wait()

    async def opened(path: str, **kwargs: int) -> Streams:
        reader, writer = await connect(path, **kwargs)
        writers.append(writer)
        return reader, writer

    async def sidecar(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.put_nowait(await reader.readline())
        writer.write(b"\n")
        await reader.read()
        writer.close()

    writers: list[asyncio.StreamWriter] = []
    connected: asyncio.Queue[bytes] = asyncio.Queue()
    connect, received = asyncio.open_unix_connection, EventLink._receive
    monkeypatch.setattr(asyncio, "open_unix_connection", opened)
    monkeypatch.setattr(EventLink, "_receive", breaks)
    path = str(tmp_path / "events.sock")
    async with await asyncio.start_unix_server(sidecar, path), background_tasks() as tasks:
        link = EventLink(path, {"type": "hello"}, _NoPins(), SystemClock(), tasks)
        tasks.start(link.run(), name="link")
        assert b"hello" in await connected.get()
        assert b"hello" in await connected.get()
