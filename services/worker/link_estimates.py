"""What pulls from one decode engine take, from a few measured pulls. Pure rules.

A duration is the link's own time plus whatever else the engine did meanwhile, so
noise only ever adds. Two rules follow. A pull that is much faster than an older
one allows proves that the older one no longer holds. A pull that is slower than
expected proves nothing by itself; several in a row do, the more of them the more
often the link has been slow by chance before.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.worker.pull_plan import PullCost

_WINDOW = 16
_SLACK_SECONDS = 0.02
"""How much of a short pull's duration may be the engine's own stepping."""
_LONG = 4096
"""Tokens of a pull whose duration is all the link's."""
_FACTOR = 2.0
"""Durations that differ by less than this are taken for the same link."""
_RECENCY = 0.85
"""Weight of each sample against the next newer one."""
_CONTENDED = 1 / 3
"""Weight of a pull that ran beside other legs."""
_CONFIRMATIONS = 3
_MAX_CONFIRMATIONS = 8
_MEMORY = 32
"""Pulls over which chance slowness is counted."""
_LEAST_SHARE = 0.1
"""At least this share of a duration is the transfer itself."""


@dataclass(frozen=True)
class PullSample:
    """One pull."""

    tokens: int
    """At least 1."""
    seconds: float
    contended: bool = False
    """True if the prefill engine ran other legs meanwhile."""


class LinkEstimator:
    """The link to one decode engine. Keeps at most a few dozen samples."""

    def __init__(self) -> None:
        self._window: list[PullSample] = []  # oldest first
        self._suspects: list[PullSample] = []
        self._chance: deque[bool] = deque(maxlen=_MEMORY)
        self._cost: PullCost | None = None  # of the window; None: not fitted yet

    @property
    def samples(self) -> int:
        """Pulls that the estimate rests on."""
        return len(self._window)

    @property
    def cost(self) -> PullCost | None:
        """The estimate; None before the first pull."""
        if self._cost is None:
            self._cost = fit(self._window)
        return self._cost

    @property
    def tokens_per_second(self) -> float:
        """Rate of the longest pulls, their latency included; 0 before the first."""
        if not self._window:
            return 0.0
        top = max(_octave(sample) for sample in self._window)
        longest = [sample for sample in self._window if _octave(sample) == top]
        return _quantile(
            [(sample.tokens / max(sample.seconds, 1e-9), 1.0) for sample in longest], 0.5
        )

    def add(self, sample: PullSample) -> None:
        """Take a pull in."""
        kept = [old for old in self._window if not _refutes(sample, old)]
        if len(kept) < len(self._window):
            self._window, self._cost = kept, None
        if self._is_slow(sample):
            self._suspect(sample)
            return
        self._chance.extend([True] * len(self._suspects))
        self._chance.append(False)
        self._suspects.clear()
        self._keep(sample)

    def add_failure(self, sample: PullSample) -> None:
        """Take a pull in that failed. It counts if failing took long."""
        if self._is_slow(sample):
            self._suspect(sample)

    def _is_slow(self, sample: PullSample) -> bool:
        cost = self.cost
        if cost is None:
            return False
        return sample.seconds > _FACTOR * cost.seconds(sample.tokens) + _SLACK_SECONDS

    def _suspect(self, sample: PullSample) -> None:
        self._suspects.append(sample)
        evidence = sum(_CONTENDED if each.contended else 1.0 for each in self._suspects)
        needed = min(_CONFIRMATIONS + sum(self._chance), _MAX_CONFIRMATIONS)
        if evidence >= needed - 1e-9:
            self._window, self._suspects = self._suspects[-_WINDOW:], []
            self._cost = None
            self._chance.clear()

    def _keep(self, sample: PullSample) -> None:
        """Add to the window; if it is full, the oldest of the commonest size goes.

        A few long pulls tell the rate, so they must outlive many short ones.
        """
        self._window.append(sample)
        self._cost = None
        if len(self._window) > _WINDOW:
            octaves = [_octave(each) for each in self._window]
            commonest = max(set(octaves), key=octaves.count)
            del self._window[octaves.index(commonest)]


def fit(samples: Sequence[PullSample]) -> PullCost | None:
    """Latency and time per token of samples, oldest first; None without any.

    The time per token comes from pairs of pulls of different sizes, outliers
    left out. While all pulls are short, as much of the time counts as latency as
    the engine's own stepping may explain: a long pull must not look slow because a
    short one had to wait for a step.
    """
    if not samples:
        return None
    weighted = [
        (sample, (_CONTENDED if sample.contended else 1.0) * _RECENCY**age)
        for age, sample in zip(range(len(samples) - 1, -1, -1), samples, strict=True)
    ]
    longest = max(sample.tokens for sample in samples)
    slack = _SLACK_SECONDS * max(1 - longest / _LONG, 0.0)
    by_size = sorted((sample.tokens, sample.seconds, weight) for sample, weight in weighted)
    slopes = [
        (max(slower - faster - slack, 0.0) / (large - small), one * other * (large - small))
        for (small, faster, one), (large, slower, other) in itertools.combinations(by_size, 2)
        if large >= 1.5 * small
    ]
    shortest = min(sample.seconds for sample in samples)
    if slopes:
        slope = _quantile(slopes, 0.5)
    else:
        latency = min(shortest, slack)
        slope = _quantile([((s.seconds - latency) / s.tokens, w) for s, w in weighted], 0.5)
    slope = max(slope, _LEAST_SHARE * min(s.seconds / s.tokens for s in samples))
    latency = _quantile([(s.seconds - slope * s.tokens, w) for s, w in weighted], 0.25)
    return PullCost(min(max(latency, 0.0), shortest), slope)


def _refutes(new: PullSample, old: PullSample) -> bool:
    """True if a new pull was faster than the older one says is possible."""
    if old.tokens <= new.tokens:
        return old.seconds > _FACTOR * new.seconds
    # The new pull's whole time bounds the latency, and so the old one's rate.
    least_slope = (old.seconds - new.seconds) / old.tokens
    return _FACTOR * new.seconds < least_slope * new.tokens


def _octave(sample: PullSample) -> int:
    return sample.tokens.bit_length()


def _quantile(values: Iterable[tuple[float, float]], share: float) -> float:
    """The value below which that share of the weight lies."""
    ordered = sorted(values)
    wanted = share * sum(weight for _, weight in ordered)
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted:
            return value
    return ordered[-1][0]
