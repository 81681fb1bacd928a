"""How fast a prefill engine computes, from the legs it ran."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.prefill_speed import PrefillSpeed, SharedTime
from services.worker.pull_plan import RecomputeCost

TRUE = RecomputeCost(seconds_per_token=3e-5, seconds_per_token_and_context=1e-9)
OVERHEAD = 0.01


def leg(
    speed: PrefillSpeed, start: int, tokens: int, *, queued: float = 0.0, alone: bool = True
) -> None:
    seconds = OVERHEAD + TRUE.seconds(start, start + tokens) + queued
    speed.add(start, tokens, seconds, alone=alone)


def estimate(speed: PrefillSpeed, start: int, end: int) -> float:
    cost = speed.cost
    assert cost is not None
    return cost.seconds(start, end)


def test_nothing_is_known_before_a_leg_long_enough() -> None:
    speed = PrefillSpeed()
    leg(speed, 0, 100)
    speed.add(0, 5000, 0.0, alone=True)
    assert speed.cost is None


def test_one_leg_tells_the_speed_near_its_size() -> None:
    speed = PrefillSpeed()
    leg(speed, 0, 8000)
    assert estimate(speed, 0, 8000) == pytest.approx(OVERHEAD + TRUE.seconds(0, 8000))


def test_legs_of_many_lengths_tell_the_cost_of_context() -> None:
    speed = PrefillSpeed()
    for tokens in (2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000):
        leg(speed, 0, tokens)
    for start, end in ((0, 8000), (0, 100_000), (60_000, 100_000)):
        assert estimate(speed, start, end) == pytest.approx(TRUE.seconds(start, end), rel=0.15)


def test_queueing_does_not_make_the_engine_look_slow() -> None:
    rng = random.Random(1)
    speed = PrefillSpeed()
    for _ in range(16):
        leg(speed, 0, 8000, queued=rng.choice([0.0, 0.0, 1.0, 3.0]))
    assert estimate(speed, 0, 8000) == pytest.approx(TRUE.seconds(0, 8000), rel=0.1)


def test_legs_that_ran_alone_decide() -> None:
    speed = PrefillSpeed()
    leg(speed, 0, 8000)
    for _ in range(100):
        leg(speed, 0, 8000, queued=5.0, alone=False)
    assert estimate(speed, 0, 8000) == pytest.approx(TRUE.seconds(0, 8000), rel=0.1)


def test_the_overhead_of_short_legs_at_a_long_context_is_not_taken_for_speed() -> None:
    speed = PrefillSpeed()
    leg(speed, 0, 32_000)
    for _ in range(20):
        leg(speed, 16_000, 150)
    assert estimate(speed, 0, 32_000) == pytest.approx(TRUE.seconds(0, 32_000), rel=0.2)


def test_short_prompts_overhead_is_seen_through_by_longer_ones() -> None:
    speed = PrefillSpeed()
    for _ in range(10):
        leg(speed, 0, 150)
    leg(speed, 0, 8000)
    assert estimate(speed, 0, 8000) == pytest.approx(TRUE.seconds(0, 8000), rel=0.1)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.floats(0, 1e4), st.booleans()),
        max_size=50,
    )
)
def test_whatever_comes_the_line_neither_falls_nor_is_negative(
    legs: list[tuple[int, int, float, bool]],
) -> None:
    speed = PrefillSpeed()
    for start, tokens, seconds, alone in legs:
        speed.add(start, tokens, seconds, alone=alone)
    cost = speed.cost
    if cost is not None:
        assert cost.seconds_per_token >= 0
        assert cost.seconds_per_token_and_context >= 0


class TestSharedTime:
    def test_a_leg_alone_has_all_of_its_time(self) -> None:
        time = SharedTime()
        entry = time.enter(10.0)
        assert time.leave(12.5, entry) == (2.5, True)

    def test_legs_at_once_share_it(self) -> None:
        time = SharedTime()
        first, second = time.enter(0.0), time.enter(1.0)
        assert time.leave(3.0, first) == (2.0, False)
        assert time.leave(4.0, second) == (2.0, False)

    def test_idle_time_is_nobodys(self) -> None:
        time = SharedTime()
        time.leave(1.0, time.enter(0.0))
        entry = time.enter(100.0)
        assert time.leave(101.0, entry) == (1.0, True)

    def test_shares_add_up_to_the_time_that_legs_ran(self) -> None:
        rng = random.Random(3)
        time, now, total, busy = SharedTime(), 0.0, 0.0, 0.0
        running: list[tuple[float, int]] = []
        for _ in range(500):
            step = rng.random()
            busy += step if running else 0.0
            now += step
            if running and rng.random() < 0.5:
                total += time.leave(now, running.pop(rng.randrange(len(running))))[0]
            else:
                running.append(time.enter(now))
        total += sum(time.leave(now, entry)[0] for entry in running)
        assert total == pytest.approx(busy)
