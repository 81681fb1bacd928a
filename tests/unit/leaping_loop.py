"""An event loop that waits for no timer: with nothing else due, its clock goes to the next one."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any


class _NoWaiting(selectors.DefaultSelector):
    """Tells how long it was to wait, and does not."""

    def __init__(self, passes: Callable[[float], None]) -> None:
        super().__init__()
        self._passes = passes

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now."""
        assert timeout is not None, "nothing is left that could happen"
        self._passes(timeout)
        return super().select(0)


class LeapingLoop(asyncio.SelectorEventLoop):
    """Time passes in it only by what it would have waited, so that tests see exact times."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_NoWaiting(self._pass))

    def time(self) -> float:
        """Seconds."""
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += max(seconds, 0.0)


def leaping(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in a loop of that kind."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=LeapingLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
