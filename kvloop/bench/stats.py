"""Medians, percentiles and ratios. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies, interpolated linearly.

    Args:
        values: at least one, in any order.
        share: 0 to 1; 0.5 is the median.

    Raises:
        ValueError: no values, or a share outside 0 to 1.
    """
    if not values:
        raise ValueError("no values have no percentile")
    if not 0 <= share <= 1:
        raise ValueError(f"a share of {share} is not between 0 and 1")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is told of many measurements of one thing.

    Attributes:
        count: measurements.
        mean: their arithmetic mean.
        least: smallest.
        p50: median.
        p90: 90th percentile.
        p99: 99th percentile; of fewer than a hundred measurements it is close to
            the largest.
        most: largest.
    """

    count: int
    mean: float
    least: float
    p50: float
    p90: float
    p99: float
    most: float

    @property
    def spread(self) -> float:
        """Largest less smallest, as a share of the median; 0 if that is 0."""
        return (self.most - self.least) / self.p50 if self.p50 else 0.0


def distribution(values: Sequence[float]) -> Distribution | None:
    """The distribution of some measurements; None if there are none."""
    if not values:
        return None
    return Distribution(
        count=len(values),
        mean=sum(values) / len(values),
        least=min(values),
        p50=percentile(values, 0.5),
        p90=percentile(values, 0.9),
        p99=percentile(values, 0.99),
        most=max(values),
    )


def ratio(slow: float | None, fast: float | None) -> float | None:
    """How many times `fast` fits into `slow`; None if one is missing or zero."""
    if slow is None or not fast:
        return None
    return slow / fast
