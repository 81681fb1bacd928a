"""Virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timeline:
    """Runs what is due, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def clock(self) -> float:
        """The time."""
        return self.now

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Run something so much later."""
        heapq.heappush(self._due, (self.now + seconds, next(self._order), event))

    def run(self) -> None:
        """Go on until nothing is due any more."""
        while self._due:
            self.now, _, event = heapq.heappop(self._due)
            event()
