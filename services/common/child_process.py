"""Processes of a service, started by a parent that supervises them.

A child is a fresh interpreter, since neither gRPC nor threads survive a fork. A pipe
joins it to its parent: the child says on it that it serves, and leaves when the
parent has ended in whatever way, as nobody would end it any more.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_SPAWN = multiprocessing.get_context("spawn")


class ParentLink:
    """A child's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def serving(self) -> None:
        """Tell the parent that this process serves."""
        self._pipe.send_bytes(b"serving")

    @contextmanager
    def stop_when_alone(self, stop: asyncio.Event) -> Iterator[None]:
        """Set `stop` if the parent ends while the block runs."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), stop.set)  # nothing is sent: it is the end
        try:
            yield
        finally:
            loop.remove_reader(self._pipe.fileno())


class SpawnedChild(Generic[T]):
    """A process that runs `main`. See `supervisor.Child`.

    Args:
        main: a function of a module; gets the child's end of the pipe.
        work: its other argument; it is pickled.
        number: of the process, for its name.
    """

    def __init__(self, main: Callable[[ParentLink, T], Any], work: T, number: int) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=_run, args=(main, theirs, work), name=f"process {number}"
        )
        self._process.start()
        theirs.close()

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
    main(ParentLink(pipe), work)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    found = asyncio.Event()
    loop.add_reader(descriptor, found.set)
    try:
        await found.wait()
    finally:
        loop.remove_reader(descriptor)
