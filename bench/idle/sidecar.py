"""The least of a sidecar: takes the connector's events and renews every lease."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import TracebackType
from typing import Any

_RENEW_EVERY_SECONDS = 20.0
_LEASE_SECONDS = 60.0
_LONGEST_LINE = 1 << 24


class Sidecar:
    """Listens at a Unix socket while the block runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pins: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def retained(self) -> int:
        """Turns that the engine retains."""
        return len(self._pins)

    async def wait_for_pins(self, count: int) -> None:
        """Wait until the engine has told of so many retained turns."""
        async with asyncio.timeout(60):
            while len(self._pins) < count:
                self._changed.clear()
                await self._changed.wait()

    async def __aenter__(self) -> Sidecar:
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=_LONGEST_LINE)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(self._renew(writer), name="renew")
            while line := await reader.readline():
                self._take(json.loads(line))
            renewing.cancel()
        writer.close()

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "finished" and event["retained"]:
            self._pins.add(event["params"]["remote_request_id"])
            self._changed.set()
        elif event["type"] == "freed":
            self._pins.difference_update(event["request_ids"])

    async def _renew(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(_RENEW_EVERY_SECONDS)
            pins = [[request_id, _LEASE_SECONDS] for request_id in self._pins]
            writer.write(json.dumps({"type": "renew", "pins": pins}).encode() + b"\n")
            await writer.drain()
