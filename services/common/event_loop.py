"""The event loop that services run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program to its end: on uvloop where it is installed, else on asyncio's loop.

    uvloop takes about a tenth less processor time for each streamed token.
    """
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # a platform without it, or an image that goes without
        return asyncio.new_event_loop
    return uvloop.new_event_loop
