"""Processes that are started again whenever they end, as a supervisor would."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

_START_SECONDS = 120.0
_LOOK_SECONDS = 0.05


class Service:
    """One process, over all of its lives; made by `supervised`.

    Attributes:
        name: for reports, and of its log.
        command: what is run.
        up: set while it serves.
        ends: how it ended without having been asked to, life by life.
    """

    def __init__(self, name: str, module: str, args: Sequence[str], port: int, log: Path) -> None:
        self.name = name
        self.up = asyncio.Event()
        self.ends: list[str] = []
        self.command = (sys.executable, "-m", module, *args)
        self._port = port
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._asked_to_end = False

    @property
    def pid(self) -> int:
        """Process id of its present life."""
        assert self._process is not None
        return self._process.pid

    @property
    def port(self) -> int:
        """Port by which it is seen to serve."""
        return self._port

    def end(self, how: signal.Signals) -> None:
        """Send a signal that ends this life."""
        self._asked_to_end = True
        self.up.clear()
        assert self._process is not None
        self._process.send_signal(how)

    async def keep_up(self) -> None:
        """Run life after life until cancelled, which ends the last one."""
        while True:
            log = await asyncio.to_thread(open, self._log, "ab")
            with log:
                self._process = await asyncio.create_subprocess_exec(
                    *self.command, stdout=log, stderr=log
                )
            try:
                # A process that ends before it serves is started again likewise.
                async with asyncio.TaskGroup() as life:
                    watching = life.create_task(self._until_serving(), name=f"start {self.name}")
                    status = await self._process.wait()
                    watching.cancel()
            finally:
                self.up.clear()
                if self._process.returncode is None:
                    self._process.kill()
                    await self._process.wait()
            if not self._asked_to_end:
                self.ends.append(f"status {status}")
                await asyncio.sleep(_LOOK_SECONDS)
            self._asked_to_end = False

    async def _until_serving(self) -> None:
        while not await is_open(self._port):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
        self.up.set()


@asynccontextmanager
async def supervised(services: Sequence[Service]) -> AsyncIterator[None]:
    """Keep processes up while the block runs; killed at its end.

    Raises:
        TimeoutError: one did not come up; its log says why.
    """
    async with asyncio.TaskGroup() as supervisors:
        running = [
            supervisors.create_task(service.keep_up(), name=service.name) for service in services
        ]
        try:
            async with asyncio.timeout(_START_SECONDS):
                for service in services:
                    await service.up.wait()
            yield
        finally:
            for task in running:
                task.cancel()


async def is_open(port: int) -> bool:
    """Whether something on this machine takes connections at the port."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
