"""How fast a prefill engine computes, by context length, from the legs it ran. Pure rules.

Computing n tokens after c others takes n·a + b·n·(c + n/2): the mean rate of a leg
lies on a line over its mean context, c + n/2. A leg's duration also holds what is
no computing (HTTP, queueing, other legs' steps), which only ever adds. So legs
that ran alone decide, the lower quartile of them, and only where there are none
the share of the engine that a leg had.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.pull_plan import RecomputeCost

_LEAST_TOKENS = 128
"""Shorter legs are mostly overhead."""
_PER_OCTAVE = 16


class SharedTime:
    """A clock that advances by 1/k of the time while k legs run.

    The difference between a leg's end and its start is the time that it had the
    engine to itself, if legs share it evenly.
    """

    def __init__(self) -> None:
        self._running = 0
        self._entered = 0
        self._shared = 0.0
        self._at = 0.0

    def enter(self, now: float) -> tuple[float, int]:
        """A leg starts. Returns what `leave` wants."""
        self._advance(now)
        self._running += 1
        self._entered += 1
        # A leg that others were running beside is never told from a crowd.
        return self._shared, self._entered if self._running == 1 else -1

    def leave(self, now: float, entry: tuple[float, int]) -> tuple[float, bool]:
        """A leg ends. Returns its share of the time, and if it was alone all along."""
        self._advance(now)
        self._running -= 1
        shared, entered = entry
        return self._shared - shared, entered == self._entered

    def _advance(self, now: float) -> None:
        if self._running:
            self._shared += (now - self._at) / self._running
        self._at = now


@dataclass
class _Octave:
    """Legs whose mean context is alike: (mean context, seconds per token, tokens)."""

    alone: list[tuple[float, float, int]] = field(default_factory=list)
    beside_others: list[tuple[float, float, int]] = field(default_factory=list)

    def point(self) -> tuple[float, float, int]:
        """Mean context, rate and weight of the octave."""
        legs, share = (self.alone, 0.25) if self.alone else (self.beside_others, 0.5)
        ordered = sorted(legs, key=lambda leg: leg[1])
        total = sum(tokens for _, _, tokens in ordered)
        reached = 0
        for context, rate, tokens in ordered:
            reached += tokens
            if reached >= share * total:
                return context, rate, total
        raise AssertionError("an octave has at least one leg")


class PrefillSpeed:
    """What one prefill engine's legs say of its speed."""

    def __init__(self) -> None:
        self._octaves: dict[int, _Octave] = {}
        self._cost: RecomputeCost | None = None  # of the octaves; None: not fitted yet

    def add(self, start: int, tokens: int, seconds: float, *, alone: bool) -> None:
        """Take a leg in.

        Args:
            start: tokens before those computed.
            tokens: tokens computed.
            seconds: time it took, of a leg beside others its share.
            alone: whether no other leg ran meanwhile.
        """
        if tokens < _LEAST_TOKENS or seconds <= 0:
            return
        self._cost = None
        context = start + tokens / 2
        octave = self._octaves.setdefault(int(context).bit_length(), _Octave())
        legs = octave.alone if alone else octave.beside_others
        legs.append((context, seconds / tokens, tokens))
        if len(legs) > _PER_OCTAVE:
            # The shortest says least; of equals, the oldest goes.
            legs.remove(min(legs, key=lambda leg: leg[2]))

    @property
    def cost(self) -> RecomputeCost | None:
        """The estimate; None before the first leg that is long enough."""
        if self._cost is None:
            self._cost = self._fit()
        return self._cost

    def _fit(self) -> RecomputeCost | None:
        points = [octave.point() for _, octave in sorted(self._octaves.items())]
        if not points:
            return None
        # Rates rise with context. A short prompt's overhead makes its rate too
        # high, which a lower rate further on shows.
        lowest = float("inf")
        envelope: list[tuple[float, float, int]] = []
        for context, rate, weight in reversed(points):
            lowest = min(lowest, rate)
            envelope.append((context, lowest, weight))
        return _line(envelope)


def _line(points: list[tuple[float, float, int]]) -> RecomputeCost:
    """The line through points (context, rate, weight), neither falling nor negative."""
    total = sum(weight for _, _, weight in points)
    mean_x = sum(x * weight for x, _, weight in points) / total
    mean_y = sum(y * weight for _, y, weight in points) / total
    spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    if spread == 0:
        return RecomputeCost(mean_y, 0.0)
    slope = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / spread
    # Through the first point at most: a negative rate at an empty context is none.
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return RecomputeCost(max(mean_y - slope * mean_x, 0.0), slope)
