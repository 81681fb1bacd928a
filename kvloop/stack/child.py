"""One process of the stack."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvloop.stack import tether
from kvloop.stack.errors import ProcessDiedError
from kvloop.stack.leftovers import MARKER, find_leftovers, kill_leftovers
from kvloop.stack.logs import LogFollower, last_lines
from kvloop.stack.plan import ProcessSpec

_POLL_SECONDS = 0.05
_LINES_SHOWN = 15
_KILL_SECONDS = 5.0
"""For the kernel to clear away what SIGKILL ended; engines hold gigabytes."""


class Child:
    """Starts, signals and ends one process, any number of times.

    The process is polled rather than awaited through asyncio's subprocesses:
    those kill their process when the event loop that started it is closed, while
    a test may restart a process that later tests go on using.

    Args:
        spec: what to run.
        stack_id: unique name of the stack.
        environment: environment of the process, less what spec adds.
    """

    def __init__(self, spec: ProcessSpec, stack_id: str, environment: Mapping[str, str]) -> None:
        self.spec = spec
        self.log = LogFollower(spec.log)
        self._mark = f"{stack_id}/{spec.name}"
        self._environment = {
            **environment,
            **spec.env,
            MARKER: self._mark,
            # Engines set their process title, which else overwrites what
            # /proc shows of the environment, and the mark with it.
            "SPT_NOENV": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._end_expected = False

    @property
    def pid(self) -> int | None:
        """Id of the running process; None if it is not running."""
        return self._process.pid if self._process is not None and self.is_running() else None

    def is_running(self) -> bool:
        """True from spawn until the process has ended."""
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start the process, in a session of its own, its output in the log.

        The terminal's Ctrl-C does not reach it; the end of this process does.
        """
        self.log.skip()
        self._end_expected = False
        with self.spec.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(Path(tether.__file__))),
                    *(str(os.getpid()), *self.spec.argv),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def check_alive(self) -> None:
        """Notice an end that nobody asked for.

        Raises:
            ProcessDiedError: the process has ended by itself.
        """
        if self._process is None or self._end_expected:
            return
        status = self._process.poll()
        if status is not None:
            raise ProcessDiedError(self.spec.name, status, self.spec.log, self.last_lines())

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process alone, as a crash or an operator would."""
        if self._process is not None and self.is_running():
            self._end_expected |= signum not in (signal.SIGSTOP, signal.SIGCONT)
            self._process.send_signal(signum)

    async def end(self, timeout_seconds: float) -> None:
        """End the process and whatever it started; harmless if it is not running.

        SIGTERM first, SIGKILL after the timeout. What the process leaves behind
        is killed.
        """
        if self._process is None:
            return
        self.send_signal(signal.SIGTERM)
        await _wait_until(lambda: not self.is_running(), timeout_seconds)
        self.kill_all()
        await _wait_until(self._is_gone, _KILL_SECONDS)

    def kill_all(self) -> None:
        """Kill the process and everything it started, at once."""
        if self._process is None:
            return
        self._end_expected = True
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group has ended
        kill_leftovers(self._mark)

    def last_lines(self) -> list[str]:
        """Last lines of the process's log and, if it has one, its engine's."""
        lines = last_lines(self.spec.log, _LINES_SHOWN)
        if self.spec.engine_log is not None:
            lines += last_lines(self.spec.engine_log, _LINES_SHOWN)
        return lines

    def _is_gone(self) -> bool:
        return not self.is_running() and not find_leftovers(self._mark)


async def _wait_until(condition: Callable[[], bool], timeout_seconds: float) -> None:
    """Return when the condition holds, or at the timeout: the caller has harder means."""
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                if condition():
                    return
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        return
