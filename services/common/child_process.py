"""Processes of a service, started by a parent that supervises them.

A child is a fresh interpreter, since neither gRPC nor threads survive a fork. A pipe
joins it to its parent: the child says on it that it serves, and leaves when the
parent has ended in whatever way, as nobody would end it any more. The kernel signals
that end too, for a child that is not yet listening.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_SPAWN = multiprocessing.get_context("spawn")
_PR_SET_PDEATHSIG = 1


class ParentLink:
    """A child's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def serving(self) -> None:
        """Tell the parent that this process serves."""
        self._pipe.send_bytes(b"serving")

    @contextmanager
    def stop_when_alone(self, stop: asyncio.Event, patience_seconds: float) -> Iterator[None]:
        """Set `stop` if the parent ends while the block runs.

        A thread sees to it, which a loop that hangs does not stop.

        Args:
            stop: ends the block.
            patience_seconds: how long the block may take to end then, before this
                process is killed.
        """
        loop = asyncio.get_running_loop()
        over = Event()

        def watch() -> None:
            self._pipe.poll(None)  # nothing is ever sent, so it is the parent's end
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(stop.set)
            if not over.wait(patience_seconds):
                os.kill(os.getpid(), signal.SIGKILL)

        Thread(target=watch, name="watch parent", daemon=True).start()
        try:
            yield
        finally:
            over.set()


class SpawnedChild(Generic[T]):
    """A process that runs `main`. See `supervisor.Child`.

    Args:
        main: a function of a module; gets the child's end of the pipe.
        work: its other argument; it is pickled.
        number: of the process, for its name.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, main: Callable[[ParentLink, T], Any], work: T, number: int) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=_run, args=(main, theirs, work), name=f"process {number}"
        )
        with theirs:
            try:
                self._process.start()
            except OSError:
                self._pipe.close()
                raise

    @property
    def pid(self) -> int:
        """See `Child.pid`."""
        return self._process.pid or 0

    async def ready(self) -> bool:
        """See `Child.ready`."""
        await _readable(self._pipe.fileno())
        try:
            self._pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return False
        return True

    async def ended(self) -> int:
        """See `Child.ended`."""
        await _readable(self._process.sentinel)
        self._process.join()
        status = self._process.exitcode or 0
        self._pipe.close()
        return status

    def send_signal(self, signum: int) -> None:
        """See `Child.send_signal`."""
        if self._process.is_alive():
            os.kill(self.pid, signum)


def _run(main: Callable[[ParentLink, T], Any], pipe: Connection, work: T) -> None:
    _terminate_with_parent()
    main(ParentLink(pipe), work)


def _terminate_with_parent() -> None:
    """Let the kernel send SIGTERM when the parent's thread that started us ends.

    `kvloop.stack.tether` asks for the same, but belongs to the client's side.
    """
    parent = multiprocessing.parent_process()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if parent is None or os.getppid() != parent.pid:
        sys.exit(1)  # it had ended before the kernel was asked


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    found = asyncio.Event()
    loop.add_reader(descriptor, found.set)
    try:
        await found.wait()
    finally:
        loop.remove_reader(descriptor)
