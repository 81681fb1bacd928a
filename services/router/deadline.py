"""One deadline for a whole turn, handed on from hop to hop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvloop.errors import DeadlineError

_LEAST_SECONDS = 0.005
"""No hop gets less. Also covers timers of gRPC that fire a moment early."""

Clock = Callable[[], float]
"""Seconds on a clock that never goes back."""


@dataclass(frozen=True)
class Deadline:
    """When the turn must be over, by the router's clock."""

    expires_at: float
    """Reading of the clock at which the caller gives up."""
    clock: Clock
    """The clock."""
    margin_seconds: float
    """Each hop gets this much less, so that its answer still reaches the caller."""

    @property
    def passed(self) -> bool:
        """Whether too little is left to start another hop."""
        return self._left() <= _LEAST_SECONDS

    def check(self) -> None:
        """Raise DeadlineError if the deadline has passed."""
        if self.passed:
            raise DeadlineError("the deadline passed; both legs were cancelled")

    def hop_timeout(self, limit_seconds: float = math.inf) -> float:
        """Seconds that the next hop may take: what is left, at most the limit.

        Raises:
            DeadlineError: too little is left.
        """
        self.check()
        return min(self._left(), limit_seconds)

    def _left(self) -> float:
        return self.expires_at - self.margin_seconds - self.clock()
