"""Background tasks that cannot outlive the block that started them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")


class BackgroundTasks:
    """Starts tasks in a task group. Made by `background_tasks`."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T], *, name: str) -> asyncio.Task[_T]:
        """Run `work` until it ends or the block does."""
        task = self._group.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Ask all running tasks to end."""
        for task in self._running:
            task.cancel()


@asynccontextmanager
async def background_tasks() -> AsyncIterator[BackgroundTasks]:
    """Tasks that run beside the block and are cancelled at its end.

    The first task that fails cancels the others and the block. A single error
    is raised as itself, not wrapped in a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = BackgroundTasks(group)
            try:
                yield tasks
            finally:
                tasks.cancel()
    except BaseExceptionGroup as errors:
        raise _lone(errors) from None


def _lone(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
