"""What past pauses say about the next one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.gaps import PauseHistory


def _chance(history: PauseHistory, silent: float, within: float, tenant: str = "t") -> float:
    return history.outlook(tenant).chance(silent, within)


def test_with_nothing_seen_the_longer_silent_is_the_less_likely_to_return() -> None:
    history = PauseHistory()
    chances = [_chance(history, silent, 60) for silent in (0, 1, 10, 60, 300, 3600, 1e5)]
    assert chances == sorted(chances, reverse=True)
    assert 0.9 > chances[0] > chances[-1] > 0


def test_there_is_no_chance_in_no_time() -> None:
    history = PauseHistory()
    assert _chance(history, 5, 0) == 0
    assert _chance(history, 5, -3) == 0


def test_a_tenant_that_always_answers_within_a_minute_is_worth_waiting_for_until_then() -> None:
    history = PauseHistory()
    for pause in range(20, 60):
        history.returned("t", pause)
    assert _chance(history, 5, 60) > 0.9
    assert _chance(history, 100, 380) < _chance(PauseHistory(), 100, 380) + 0.05
    assert _chance(history, 5, 60) > _chance(history, 100, 60) + 0.5


def test_a_tenant_whose_conversations_are_abandoned_is_not() -> None:
    history = PauseHistory()
    for _ in range(100):
        history.cut_short("t", 480)
    assert _chance(history, 10, 470) < 0.15


def test_a_pause_that_was_cut_short_early_says_nothing_about_later() -> None:
    """Evictions must not teach that conversations never return: nobody watched."""
    history = PauseHistory()
    for _ in range(50):
        history.returned("t", 200)
    before = _chance(history, 150, 100)
    for _ in range(50):
        history.cut_short("t", 3)
    assert _chance(history, 150, 100) == pytest.approx(before, abs=0.01)


def test_an_estimate_comes_close_to_the_truth_it_was_drawn_from() -> None:
    source = random.Random(1)
    history = PauseHistory()
    pauses = [source.lognormvariate(math.log(60), 1) for _ in range(900)]
    for pause in pauses:
        if pause < 480:
            history.returned("t", pause)
        else:
            history.cut_short("t", 480)
    for silent, within in ((0.0, 60.0), (30.0, 60.0), (120.0, 300.0)):
        still = [pause for pause in pauses if pause > silent]
        true = sum(pause <= silent + within for pause in still) / len(still)
        assert _chance(history, silent, within) == pytest.approx(true, abs=0.08)


def test_a_new_tenant_is_taken_to_be_like_the_others() -> None:
    history = PauseHistory()
    for _ in range(200):
        history.returned("old", 30)
    assert _chance(history, 5, 60, "new") > 0.9
    assert _chance(history, 5, 60, "new") == _chance(history, 5, 60, "newer")


def test_a_tenants_own_pauses_outweigh_those_of_all() -> None:
    history = PauseHistory()
    for _ in range(500):
        history.returned("quick", 5)
    for _ in range(60):
        history.cut_short("slow", 400)
    assert _chance(history, 1, 20, "quick") > 0.9
    assert _chance(history, 1, 20, "slow") < 0.5


def test_habits_change() -> None:
    history = PauseHistory()
    for _ in range(3000):
        history.cut_short("t", 480)
    for _ in range(3000):
        history.returned("t", 30)
    assert _chance(history, 10, 60) > 0.7


def test_memory_is_bounded() -> None:
    history = PauseHistory()
    for number in range(5000):
        history.returned(f"tenant-{number}", 3)
    assert len(history._tenants) <= 1000


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 1e7)), max_size=30),
    st.floats(0, 1e7),
    st.floats(0, 1e7),
    st.floats(0, 1e7),
)
def test_chances_are_chances_and_grow_with_time(
    seen: list[tuple[bool, float]], silent: float, within: float, longer: float
) -> None:
    history = PauseHistory()
    for came, pause in seen:
        (history.returned if came else history.cut_short)("t", pause)
    outlook = history.outlook("t")
    assert 0 <= outlook.chance(silent, within) <= 1
    assert outlook.chance(silent, within) <= outlook.chance(silent, within + longer) + 1e-12
