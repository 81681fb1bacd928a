"""What pulls from one decode engine take, from a few measured pulls."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.link_estimates import LinkEstimator, PullSample, fit
from services.worker.pull_plan import PullCost

FAST = PullCost(latency_seconds=0.003, seconds_per_token=4e-6)
SLOW = PullCost(latency_seconds=0.005, seconds_per_token=5e-4)


def sample(
    link: PullCost, tokens: int, noise: float = 0.0, *, contended: bool = False
) -> PullSample:
    return PullSample(tokens, link.seconds(tokens) + noise, contended)


def measured(link: PullCost, *sizes: int) -> LinkEstimator:
    estimator = LinkEstimator()
    for size in sizes:
        estimator.add(sample(link, size))
    return estimator


def predicted(estimator: LinkEstimator, tokens: int) -> float:
    cost = estimator.cost
    assert cost is not None
    return cost.seconds(tokens)


def test_without_a_pull_nothing_is_known() -> None:
    assert LinkEstimator().cost is None
    assert LinkEstimator().tokens_per_second == 0.0


@pytest.mark.parametrize("link", [FAST, SLOW])
def test_pulls_of_many_sizes_tell_latency_and_rate(link: PullCost) -> None:
    estimator = measured(link, 200, 8000, 1000, 30_000, 16_000)
    for tokens in (1000, 8000, 60_000):
        # Up to 20 ms of each duration may be the engine's own stepping.
        assert predicted(estimator, tokens) == pytest.approx(
            link.seconds(tokens), rel=0.1, abs=0.04
        )


def test_one_small_pull_of_a_good_link_does_not_make_long_pulls_look_slow() -> None:
    estimator = LinkEstimator()
    estimator.add(PullSample(128, 0.010))
    assert predicted(estimator, 8000) < 0.1


def test_one_small_pull_of_a_bad_link_makes_long_pulls_look_slow() -> None:
    assert predicted(measured(SLOW, 128), 8000) > 2.0


def test_the_rate_shown_is_that_of_the_longest_pulls() -> None:
    estimator = measured(SLOW, 100, 16_000, 17_000)
    assert estimator.tokens_per_second == pytest.approx(16_000 / SLOW.seconds(16_000), rel=0.01)


def test_a_fast_pull_ends_a_bad_reputation_at_once() -> None:
    estimator = measured(SLOW, *[8000] * 10, 128)
    estimator.add(sample(FAST, 256))
    assert predicted(estimator, 8000) < 0.1


def test_a_small_pull_as_fast_as_a_slow_link_allows_refutes_nothing() -> None:
    estimator = measured(SLOW, 8000, 8000)
    estimator.add(sample(SLOW, 128))
    assert predicted(estimator, 8000) == pytest.approx(SLOW.seconds(8000), rel=0.1)


def test_three_slow_pulls_in_a_row_are_believed() -> None:
    estimator = measured(FAST, *[8000] * 10)
    estimator.add(sample(SLOW, 8000))
    estimator.add(sample(SLOW, 8000))
    assert predicted(estimator, 8000) == pytest.approx(FAST.seconds(8000), rel=0.1)
    estimator.add(sample(SLOW, 8000))
    assert predicted(estimator, 8000) == pytest.approx(SLOW.seconds(8000), rel=0.1)


def test_slow_pulls_beside_other_legs_need_more_of_them() -> None:
    estimator = measured(FAST, *[8000] * 4)
    for _ in range(8):
        estimator.add(sample(SLOW, 8000, contended=True))
    assert predicted(estimator, 8000) == pytest.approx(FAST.seconds(8000), rel=0.1)
    estimator.add(sample(SLOW, 8000, contended=True))
    assert predicted(estimator, 8000) == pytest.approx(SLOW.seconds(8000), rel=0.1)


def test_failures_that_take_long_count_as_slow_pulls() -> None:
    estimator = measured(FAST, *[8000] * 4)
    for _ in range(3):
        estimator.add_failure(PullSample(8000, 5.0))
    assert predicted(estimator, 8000) == pytest.approx(5.0, rel=0.1)


def test_failures_that_end_at_once_say_nothing_of_the_link() -> None:
    estimator = measured(SLOW, 8000, 8000)
    for _ in range(10):
        estimator.add_failure(PullSample(8000, 0.001))
    assert predicted(estimator, 8000) == pytest.approx(SLOW.seconds(8000), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_chance_outliers_never_change_the_picture(seed: int) -> None:
    rng = random.Random(seed)
    estimator = measured(FAST, 8000, 4000)
    for _ in range(1000):
        noise = rng.uniform(0.5, 4.0) if rng.random() < 0.15 else rng.uniform(0.0, 0.01)
        estimator.add(sample(FAST, rng.choice([500, 2000, 8000, 20_000]), noise))
        assert predicted(estimator, 8000) < 0.15


def test_long_pulls_outlive_many_short_ones() -> None:
    estimator = measured(SLOW, 8000, 9000)
    for _ in range(100):
        estimator.add(sample(SLOW, 128))
    assert estimator.samples <= 16
    assert estimator.tokens_per_second == pytest.approx(1 / 5e-4, rel=0.05)


@given(
    st.lists(
        st.builds(PullSample, st.integers(1, 10**6), st.floats(0, 1e3), st.booleans()),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_comes_the_estimate_is_bounded_and_sane(samples: list[PullSample]) -> None:
    estimator = LinkEstimator()
    for each in samples:
        estimator.add(each)
    assert 0 < estimator.samples <= 16
    cost = estimator.cost
    assert cost is not None
    assert cost.latency_seconds >= 0
    assert cost.seconds_per_token >= 0


def test_fit_of_nothing_is_nothing() -> None:
    assert fit([]) is None
