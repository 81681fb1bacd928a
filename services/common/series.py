"""Series of a metric with labels, each looked up once."""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client import Counter, Histogram

_Metric = TypeVar("_Metric", Counter, Histogram)


class Series(Generic[_Metric]):
    """The series of one metric, by the values of its labels.

    Looking one up takes far longer than counting.

    Args:
        metric: has labels.
    """

    def __init__(self, metric: _Metric) -> None:
        self._metric: _Metric = metric
        self._known: dict[tuple[str, ...], _Metric] = {}

    def of(self, *labels: str) -> _Metric:
        """The series with those values, in the order of the metric's labels."""
        known = self._known.get(labels)
        if known is None:
            known = self._known[labels] = self._metric.labels(*labels)
        return known
