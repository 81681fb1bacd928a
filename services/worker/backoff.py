"""How long to wait before the next attempt."""

from __future__ import annotations

import random


class Backoff:
    """Doubling waits with jitter, so that many callers do not come back at once.

    Args:
        first_seconds: longest first wait.
        last_seconds: longest wait ever.
    """

    def __init__(self, first_seconds: float, last_seconds: float) -> None:
        self._first = first_seconds
        self._last = last_seconds
        self._next = first_seconds

    def next_seconds(self) -> float:
        """The wait before the next attempt: half to all of the current step."""
        step = self._next
        self._next = min(2 * step, self._last)
        return step * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin again after a success."""
        self._next = self._first
