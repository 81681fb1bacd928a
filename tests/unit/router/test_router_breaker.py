"""The circuit breaker's state machine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.breaker import Breaker, BreakerLimits, BreakerState

LIMITS = BreakerLimits(failures=3, cooldown_seconds=2, max_cooldown_seconds=12)


def opened(now: float = 0.0) -> Breaker:
    return Breaker().failed(now, 0, LIMITS, certain=True)


def test_a_failure_that_leaves_no_doubt_opens_at_once() -> None:
    breaker = opened()
    assert breaker.state(1.9) is BreakerState.OPEN
    assert not breaker.admits(1.9)
    assert breaker.state(2.0) is BreakerState.HALF_OPEN
    assert breaker.admits(2.0)


def test_other_failures_open_when_there_are_enough_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(2):
        breaker = breaker.failed(0.0, 0, LIMITS, certain=False)
        assert breaker.state(0.0) is BreakerState.CLOSED
    assert breaker.failed(0.0, 0, LIMITS, certain=False).state(0.0) is BreakerState.OPEN
    well = breaker.succeeded(0).failed(0.0, 0, LIMITS, certain=False)
    assert well.state(0.0) is BreakerState.CLOSED


def test_one_probe_at_a_time() -> None:
    breaker = opened()
    assert breaker.is_probe(2.0)
    probing = breaker.probe_started()
    assert not probing.admits(2.0)
    assert not probing.is_probe(2.0)
    assert probing.probe_abandoned().admits(2.0)


def test_a_closed_breaker_needs_no_probe() -> None:
    assert not Breaker().is_probe(0.0)
    assert not opened().is_probe(1.0)


def test_a_probe_that_succeeds_closes_and_forgets() -> None:
    assert opened().probe_started().succeeded(1) == Breaker(generation=1)


def test_the_first_chunk_of_an_answer_closes_and_forgets_nothing() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker = breaker.failed(0.0, 0, LIMITS, certain=False)
    answered = breaker.probe_started().answered(1)
    assert answered.state(2.0) is BreakerState.CLOSED
    again = answered.failed(2.0, 1, LIMITS, certain=False)
    assert again.state(5.9) is BreakerState.OPEN
    assert again.state(6.0) is BreakerState.HALF_OPEN


def test_the_first_chunk_of_an_older_turn_closes_nothing() -> None:
    assert opened().answered(0) == opened()


def test_while_open_failures_neither_count_nor_prolong() -> None:
    assert opened().failed(1.9, 1, LIMITS, certain=True) == opened()
    assert opened().failed(2.0, 1, LIMITS, certain=True).state(5.9) is BreakerState.OPEN


def test_an_opening_is_told_from_those_before_it_was_closed() -> None:
    first = opened()
    second = first.succeeded(1).failed(3.0, 1, LIMITS, certain=True)
    assert second.openings == first.openings
    assert second.succeeded(first.generation) == second
    assert second.state(4.9) is BreakerState.OPEN


def test_probes_that_fail_double_the_cooldown_up_to_its_bound() -> None:
    breaker, now, waits = opened(), 0.0, []
    for _ in range(5):
        assert breaker.open_until is not None
        waits.append(breaker.open_until - now)
        now = breaker.open_until
        breaker = breaker.probe_started().failed(now, breaker.generation, LIMITS, certain=False)
    assert waits == [2, 4, 8, 12, 12]


def test_turns_that_began_before_it_opened_say_nothing() -> None:
    breaker = opened()
    assert breaker.succeeded(0) == breaker
    assert breaker.failed(1.0, 0, LIMITS, certain=True) == breaker


def test_a_turn_that_had_no_choice_closes_it_too() -> None:
    assert opened().succeeded(1) == Breaker(generation=1)


def test_without_a_cooldown_the_next_turn_is_the_probe() -> None:
    limits = BreakerLimits(failures=1, cooldown_seconds=0, max_cooldown_seconds=0)
    assert Breaker().failed(5.0, 0, limits, certain=True).is_probe(5.0)


events = st.lists(
    st.tuples(
        st.sampled_from(["fail", "fail surely", "answer", "succeed", "abandon"]),
        st.floats(0, 10),
    ),
    max_size=30,
)


@given(events)
def test_it_never_stays_open_longer_than_its_bound_and_always_lets_a_probe_through(history) -> None:
    breaker, now = Breaker(), 0.0
    for event, seconds in history:
        now += seconds
        generation = breaker.generation
        if breaker.is_probe(now):
            breaker = breaker.probe_started()
        match event:
            case "succeed":
                breaker = breaker.succeeded(generation)
            case "answer":
                breaker = breaker.answered(generation)
            case "abandon":
                breaker = breaker.probe_abandoned()
            case _:
                certain = event == "fail surely"
                breaker = breaker.failed(now, generation, LIMITS, certain=certain)
        assert breaker.admits(now + LIMITS.max_cooldown_seconds)
        if event == "succeed":
            assert breaker == Breaker(generation=generation)
