"""Things that live in a task of their own: services that a test starts, ends and kills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Generic, Protocol, TypeVar

from tests.flow.faults.link import Link

_T = TypeVar("_T")


class Life(Generic[_T]):
    """A context that is entered and left in a task of its own, again and again.

    Args:
        build: makes the context.
    """

    def __init__(self, build: Callable[[], AbstractAsyncContextManager[_T]]) -> None:
        self._build = build
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._thing: list[_T] = []

    @property
    def service(self) -> _T:
        """What the context gave last, also after its end."""
        return self._thing[-1]

    @property
    def runs(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Enter; return when that is done."""
        self._stop.clear()
        entered = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._run(entered))
        await asyncio.wait({self._task, entered}, return_when=asyncio.FIRST_COMPLETED)
        if not entered.done():
            self._task.result()

    async def end(self) -> None:
        """Leave, and wait for it."""
        self._stop.set()
        if self._task is not None:
            await self._task

    async def _run(self, entered: asyncio.Future[None]) -> None:
        async with self._build() as thing:
            self._thing = [thing]
            entered.set_result(None)
            await self._stop.wait()


class _Serves(Protocol):
    @property
    def port(self) -> int: ...


_S = TypeVar("_S", bound=_Serves)


class Service(Life[_S]):
    """A service of kvloop.

    Args:
        build: serves while its block runs.
        ways_in: links to it.
        ways_out: links by which it reaches others.
    """

    def __init__(
        self,
        build: Callable[[], AbstractAsyncContextManager[_S]],
        *,
        ways_in: Sequence[Link] = (),
        ways_out: Sequence[Link] = (),
    ) -> None:
        super().__init__(build)
        self._ways_in, self._ways_out = ways_in, ways_out

    async def start(self) -> None:
        """Start it; return when it serves and can be reached."""
        await super().start()
        for link in self._ways_in:
            link.target_port = self.service.port
        for link in (*self._ways_in, *self._ways_out):
            if not link.works:
                await link.mend()

    async def end(self) -> None:
        """Leave, and wait for it. Its port may be anybody's then: no link leads there."""
        await super().end()
        for link in self._ways_in:
            link.target_port = 0

    async def kill(self) -> None:
        """Cut it off in the middle of what it does; nobody hears of it."""
        for link in (*self._ways_in, *self._ways_out):
            link.cut()
        await self.end()
