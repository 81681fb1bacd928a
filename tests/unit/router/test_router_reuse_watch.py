"""Reuse that stops without any turn failing is noticed."""

from __future__ import annotations

from structlog.testing import capture_logs

from services.router.reuse_watch import ReuseWatch


def note(watch: ReuseWatch, turns: int, *, retained: bool) -> None:
    for _ in range(turns):
        watch.ended(retained=retained, outcome="COMMITTED" if retained else "NO_EVENT")


def test_it_says_once_that_reuse_is_lost_and_once_that_it_is_back() -> None:
    watch = ReuseWatch()
    with capture_logs() as logged:
        note(watch, 20, retained=False)
        assert watch.degraded
        note(watch, 20, retained=True)
        assert watch.degraded
        note(watch, 10, retained=True)
    assert not watch.degraded
    assert [entry["event"] for entry in logged] == ["reuse_degraded", "reuse_recovered"]
    assert logged[0]["last_outcome"] == "NO_EVENT"


def test_the_outcome_that_is_named_is_that_of_a_turn_that_left_nothing_behind() -> None:
    watch = ReuseWatch()
    with capture_logs() as logged:
        note(watch, 7, retained=False)
        note(watch, 1, retained=True)  # the eighth, at which something can be said
    assert [entry["last_outcome"] for entry in logged] == ["NO_EVENT"]


def test_a_few_turns_prove_nothing() -> None:
    watch = ReuseWatch()
    note(watch, 7, retained=False)
    assert not watch.degraded


def test_single_turns_that_leave_nothing_behind_are_no_trouble() -> None:
    watch = ReuseWatch()
    for _ in range(20):
        note(watch, 3, retained=True)
        note(watch, 1, retained=False)
    assert not watch.degraded
