"""What an engine does in steps that have nothing to do.

While a decode engine retains blocks, vLLM steps without end, so as to see them read or
expired: about a core and a half for nothing. Here such an engine waits in its empty
steps until something arrives, and looks after its blocks a few times a second.

Only the standard library is used: this module runs inside vLLM's scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

IDLE_STEP_SECONDS = 0.2
"""Length of a step of an engine that does nothing but retain. Blocks that have been
read or whose deadline has come are free this much later."""


class Engine(Protocol):
    """What there is to know of the engine: see running_engine.py."""

    def has_requests(self) -> bool:
        """True if a request runs or waits."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait for a client's message or a call of `wake`; False if neither came."""
        ...

    def wake(self) -> None:
        """End a wait, from any thread."""
        ...


class EngineIdle:
    """Paces the empty steps of one engine.

    Args:
        engine: None if it was not found; then no step is longer than `pause_seconds`.
        pause_seconds: pause in an empty step of an engine that may be waiting for
            a transfer. 0: none.
        settle_steps: so many empty steps in a row keep that pace, so that the
            outcome of everything before them is known.
        sleep: sleeps for so many seconds.
    """

    def __init__(
        self,
        engine: Engine | None,
        *,
        pause_seconds: float,
        settle_steps: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine = engine
        self._pause_seconds = pause_seconds
        self._settle_steps = settle_steps
        self._sleep = sleep
        self._empty_steps = 0

    def pause(self, scheduled_tokens: int, pins: int) -> bool:
        """Wait as long as this step allows.

        Args:
            scheduled_tokens: tokens in this step.
            pins: finished turns whose blocks are retained.

        Returns:
            True if the engine does nothing but retain.
        """
        if scheduled_tokens > 0:
            self._empty_steps = 0
            return False
        self._empty_steps += 1
        engine = self._engine
        if (
            engine is not None
            and pins > 0
            and self._empty_steps > self._settle_steps
            and not engine.has_requests()
        ):
            if engine.wait(IDLE_STEP_SECONDS):
                self._empty_steps = 0
                return False
            return True
        if self._pause_seconds > 0:
            if engine is not None:
                engine.wait(self._pause_seconds)
            else:
                self._sleep(self._pause_seconds)
        return False

    def stir(self) -> None:
        """The step takes something to the workers: keep the pace until it is done."""
        self._empty_steps = 0

    def wake(self) -> None:
        """Something has arrived for the next step. For any thread."""
        if self._engine is not None:
            self._engine.wake()
