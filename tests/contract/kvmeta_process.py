"""A kvmeta process, as a supervisor would run it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class KvmetaProcess:
    """A running process and its port."""

    process: asyncio.subprocess.Process
    port: int

    async def kill(self) -> None:
        """kill -9: it gets no chance to finish anything."""
        self.process.kill()
        await self.process.wait()

    async def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return await self.process.wait()


@asynccontextmanager
async def run_kvmeta(database_url: str, *flags: str, port: int = 0) -> AsyncIterator[KvmetaProcess]:
    """A kvmeta that serves, by default on a free port.

    It is killed at the end if it still runs.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.kvmeta",
        f"--listen=127.0.0.1:{port}",
        f"--database-url={database_url}",
        "--log-json",
        *flags,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        port = await _serving_port(process.stderr)
        async with asyncio.TaskGroup() as group:
            draining = group.create_task(_drain(process.stderr))
            yield KvmetaProcess(process, port)
            draining.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _serving_port(log: asyncio.StreamReader) -> int:
    seen = []
    async for line in log:
        seen.append(line)
        event = json.loads(line) if line.startswith(b"{") else {}
        if event.get("event") == "kvmeta_serving":
            return int(event["port"])
    raise AssertionError(f"kvmeta did not start: {b''.join(seen).decode()}")


async def _drain(log: asyncio.StreamReader) -> None:
    async for _ in log:
        pass
