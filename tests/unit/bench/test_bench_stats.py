"""Percentiles, spread and ratios."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.bench.stats import distribution, percentile, ratio

_values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.5),
        ([4.0, 1.0, 3.0, 2.0], 0.0, 1.0),
        ([4.0, 1.0, 3.0, 2.0], 1.0, 4.0),
        ([0.0, 10.0], 0.9, 9.0),
    ],
)
def test_percentiles_are_interpolated(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


@given(_values, st.floats(0, 1))
def test_a_percentile_lies_between_the_least_and_the_most(
    values: list[float], share: float
) -> None:
    slack = 1e-9 * (1 + max(map(abs, values)))
    assert min(values) - slack <= percentile(values, share) <= max(values) + slack


@given(_values)
def test_percentiles_rise_with_the_share(values: list[float]) -> None:
    found = distribution(values)
    assert found is not None
    assert found.count == len(values)
    slack = 1e-9 * (1 + max(map(abs, values)))
    ordered = [found.least, found.p50, found.p90, found.p99, found.most]
    assert all(after >= before - slack for before, after in pairwise(ordered))


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
    assert distribution([]) is None


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_outside_its_bounds_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        percentile([1.0], share)


def test_spread_is_told_as_a_share_of_the_median() -> None:
    found = distribution([9.0, 10.0, 12.0])
    assert found is not None
    assert found.spread == pytest.approx(0.3)
    nothing = distribution([0.0, 0.0])
    assert nothing is not None
    assert nothing.spread == 0.0


def test_a_ratio_needs_both_sides() -> None:
    assert ratio(6.0, 2.0) == 3.0
    assert ratio(None, 2.0) is None
    assert ratio(6.0, None) is None
    assert ratio(6.0, 0.0) is None
