"""How long to pause before the next attempt."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Doubling pauses with jitter, so that many callers do not come back at once.

    Args:
        first_seconds: longest first pause.
        longest_seconds: longest pause ever.
        rng: random numbers in [0, 1).
    """

    def __init__(
        self,
        first_seconds: float,
        longest_seconds: float,
        *,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._first = min(first_seconds, longest_seconds)
        self._longest = longest_seconds
        self._step = self._first
        self._rng = rng

    def next_seconds(self) -> float:
        """The pause before the next attempt: half to all of the current step."""
        step = self._step
        self._step = min(2 * step, self._longest)
        return step * (0.5 + self._rng() / 2)

    def reset(self) -> None:
        """Begin again after a success."""
        self._step = self._first
