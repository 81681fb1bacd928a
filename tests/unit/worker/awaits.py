"""Cancelling a coroutine at one chosen await of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from functools import partial
from itertools import count
from typing import Any


class CancelledAt:
    """A coroutine whose task is cancelled while it waits for the n-th time.

    Args:
        work: the coroutine.
        number: which of its waits, from 0. One that it never comes to changes nothing.
    """

    def __init__(self, work: Coroutine[Any, Any, None], number: int) -> None:
        self._work = work
        self._number = number
        self.reached = False
        """Whether it came to that wait."""

    async def run(self) -> None:
        """Run it, all within the task that runs this."""
        await self

    def __await__(self) -> Generator[Any, None, None]:
        go_on = partial(self._work.send, None)
        for number in count():
            try:
                waits_for = go_on()
            except StopIteration:
                return
            if number == self._number:
                self.reached = True
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield waits_for
            except BaseException as error:
                go_on = partial(self._work.throw, error)
            else:
                go_on = partial(self._work.send, None)
