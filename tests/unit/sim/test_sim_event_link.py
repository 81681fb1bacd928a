"""The simulated engine's connection to its sidecar breaks, and is made again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.sim.events import EventLink
from services.worker.clock import SystemClock
from services.worker.tasks import background_tasks


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
