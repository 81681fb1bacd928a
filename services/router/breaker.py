"""A circuit breaker per worker: whether turns may go there. Pure values and rules.

CLOSED --failures in a row, or one that leaves no doubt--> OPEN
OPEN --cooldown--> HALF_OPEN --one turn succeeds--> CLOSED
                   HALF_OPEN --it fails--> OPEN, for twice as long
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum


class BreakerState(Enum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    HALF_OPEN = "half_open"
    """One turn at a time, to see whether the worker is well again."""
    OPEN = "open"
    """Nothing that can go elsewhere."""


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When breakers open, and for how long."""

    failures: int
    """Failures in a row of a worker that can be reached."""
    cooldown_seconds: float
    """How long a breaker is open at first; doubles each time that a probe fails."""
    max_cooldown_seconds: float
    """How long at most."""

    def cooldown(self, openings: int) -> float:
        """How long a breaker stays open after so many openings in a row."""
        doubled = math.ldexp(self.cooldown_seconds, min(openings - 1, 30))
        return max(min(doubled, self.max_cooldown_seconds), self.cooldown_seconds)


@dataclass(frozen=True, slots=True)
class Breaker:
    """One worker's breaker. Each event gives a new value; time is handed in.

    Who starts a turn keeps `generation` of that moment and passes it on with the
    turn's end: a turn that began before the breaker opened says nothing of now.
    """

    failures: int = 0
    """Failures in a row."""
    openings: int = 0
    """Times it opened since a turn last ended well."""
    generation: int = 0
    """Times it opened at all."""
    open_until: float | None = None
    """When a probe may go; None while closed."""
    probing: bool = False
    """Whether a probe is under way."""

    def state(self, now: float) -> BreakerState:
        """What it lets through."""
        if self.open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.open_until else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Whether a turn that has a choice may go to the worker."""
        return self.open_until is None or (now >= self.open_until and not self.probing)

    def is_probe(self, now: float) -> bool:
        """Whether a turn that starts now is the one that finds out."""
        return self.open_until is not None and self.admits(now)

    def probe_started(self) -> Breaker:
        """A probe is under way."""
        return replace(self, probing=True)

    def probe_abandoned(self) -> Breaker:
        """The probe ended without a verdict, as when its caller hangs up."""
        return replace(self, probing=False)

    def answered(self, generation: int) -> Breaker:
        """A turn of that generation goes well so far: it closes, and forgets nothing.

        A worker may fail each turn in mid-answer.
        """
        if generation != self.generation or self.open_until is None:
            return self
        return replace(self, open_until=None, probing=False)

    def succeeded(self, generation: int) -> Breaker:
        """A turn of that generation ended well."""
        return Breaker(generation=generation) if generation == self.generation else self

    def failed(
        self, now: float, generation: int, limits: BreakerLimits, *, certain: bool
    ) -> Breaker:
        """A turn of that generation failed.

        No effect while the breaker is open: turns that had no choice find out what
        is known, and must not prolong it.

        Args:
            now: the time.
            generation: when the turn began.
            limits: when to open.
            certain: whether one failure is enough: the worker could not be reached.
        """
        if generation != self.generation or self.state(now) is BreakerState.OPEN:
            return self
        failures = self.failures + 1
        if not (certain or self.open_until is not None or failures >= limits.failures):
            return replace(self, failures=failures)
        openings = self.openings + 1
        return Breaker(failures, openings, generation + 1, now + limits.cooldown(openings))
