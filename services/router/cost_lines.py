"""Straight lines through what was measured, for costs that only noise adds to. Pure rules."""

from __future__ import annotations

_FORGET = 0.98
"""Weight of all earlier samples at each new one."""
_OUTLIER = 2.0
"""A sample above this multiple of the line is mostly somebody else's time, ..."""
_OUTLIER_WEIGHT = 0.1
"""... and counts as this much. Enough of them still move the line."""
_SPREAD = 0.15
"""Sizes closer together than this share of their mean do not tell a slope."""


class CostLine:
    """cost = base + slope * size, both at least 0.

    Args:
        proportional: how to read samples of one size alone: as all slope, or as all
            base.
    """

    __slots__ = ("_proportional", "_w", "_wx", "_wxx", "_wxy", "_wy", "base", "samples", "slope")

    def __init__(self, *, proportional: bool) -> None:
        self._proportional = proportional
        self._w = self._wx = self._wy = self._wxx = self._wxy = 0.0
        self.samples = 0
        self.base = 0.0
        self.slope = 0.0

    def at(self, size: float) -> float:
        """The cost of that size; 0 before the first sample."""
        return self.base + self.slope * size

    def add(self, size: float, cost: float, weight: float = 1.0) -> None:
        """Take a sample in.

        Args:
            size: at least 0.
            cost: what it took; at least 0.
            weight: how much it says.
        """
        if self.samples > 1 and cost > _OUTLIER * self.at(size):
            weight *= _OUTLIER_WEIGHT
        self.samples += 1
        self._w = self._w * _FORGET + weight
        self._wx = self._wx * _FORGET + weight * size
        self._wy = self._wy * _FORGET + weight * cost
        self._wxx = self._wxx * _FORGET + weight * size * size
        self._wxy = self._wxy * _FORGET + weight * size * cost
        self._solve()

    def _solve(self) -> None:
        mean_size, mean_cost = self._wx / self._w, self._wy / self._w
        spread = self._wxx / self._w - mean_size * mean_size
        if spread <= (_SPREAD * mean_size) ** 2:
            slope = mean_cost / mean_size if self._proportional and mean_size > 0 else 0.0
        else:
            slope = (self._wxy / self._w - mean_size * mean_cost) / spread
            slope = min(max(slope, 0.0), mean_cost / mean_size)
        self.slope = slope
        self.base = max(mean_cost - slope * mean_size, 0.0)
