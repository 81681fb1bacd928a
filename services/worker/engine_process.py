"""A running vLLM server that the sidecar has started."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from services.worker import guard

_log = structlog.get_logger(__name__)

_KILL_MARGIN_SECONDS = 5.0
_TAIL_BYTES = 16 * 1024
_TAIL_LINES = 20


class EngineProcess:
    """The engine's processes and its log. Made by `start_engine`."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self.log_path = log_path
        self._read_to = log_path.stat().st_size
        self._partial = b""

    @property
    def pid(self) -> int:
        """Process id of the engine's guard, the ancestor of all its processes."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status, 128 + signal number after a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the engine to end; return its exit status."""
        return await self._process.wait()

    def new_lines(self) -> list[str]:
        """Complete lines that were added to the log since the last call."""
        with self.log_path.open("rb") as log:
            log.seek(self._read_to)
            added = log.read()
        self._read_to += len(added)
        # Progress bars end their lines with a carriage return.
        *lines, self._partial = (self._partial + added).replace(b"\r", b"\n").split(b"\n")
        return [line.decode(errors="replace") for line in lines if line]

    def last_lines(self) -> str:
        """The end of the log."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


@asynccontextmanager
async def start_engine(
    argv: Sequence[str],
    environment: dict[str, str],
    log_path: Path,
    *,
    stop_grace_seconds: float,
) -> AsyncIterator[EngineProcess]:
    """Run the engine while the block runs.

    All its processes end with the block, and with this process, however that
    ends: see guard.py.

    Args:
        argv: the engine's command line.
        environment: its whole environment.
        log_path: file that its output is appended to.
        stop_grace_seconds: from SIGTERM to SIGKILL.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    keeper_read, keeper_write = os.pipe()
    try:
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-IS",
                guard.__file__,
                str(keeper_read),
                str(stop_grace_seconds),
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(keeper_read,),
                start_new_session=True,
            )
    except BaseException:
        os.close(keeper_write)
        raise
    finally:
        os.close(keeper_read)
    try:
        yield EngineProcess(process, log_path)
    finally:
        os.close(keeper_write)
        await _end(process, stop_grace_seconds + _KILL_MARGIN_SECONDS)


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        _log.error("engine_guard_killed", pid=process.pid)
        process.kill()
        await process.wait()
