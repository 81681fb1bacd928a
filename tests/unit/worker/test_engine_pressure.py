"""A lack of KV blocks is noticed, measured, and not reported too often."""

from __future__ import annotations

import pytest

from services.worker.engine_pressure import REPORT_INTERVAL_SECONDS, Pressure

BLOCK = 16


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pressure(clock: Clock) -> Pressure:
    return Pressure(clock, BLOCK)


def test_request_that_gets_its_blocks_is_no_pressure(pressure: Pressure) -> None:
    pressure.asked("a", 1000)
    pressure.granted("a")
    assert pressure.blocks_missing(lambda: 0, 1000) is None


def test_missing_blocks_are_those_wanted_less_those_free(pressure: Pressure) -> None:
    pressure.asked("a", 10 * BLOCK + 1)
    assert pressure.blocks_missing(lambda: 4, 100) == 7


def test_every_request_without_blocks_counts(pressure: Pressure) -> None:
    pressure.asked("a", 10 * BLOCK)
    pressure.asked("b", 5 * BLOCK)
    assert pressure.blocks_missing(lambda: None, 100) == 15


def test_pass_that_ran_out_of_tokens_is_no_pressure(pressure: Pressure) -> None:
    pressure.asked("a", BLOCK)
    assert pressure.blocks_missing(lambda: 50, 8192) is None


def test_request_held_back_by_a_reserve_asks_for_one_block(pressure: Pressure) -> None:
    pressure.asked("a", BLOCK)
    assert pressure.blocks_missing(lambda: 50, 0) == 1


def test_a_pass_knows_nothing_of_the_one_before(pressure: Pressure, clock: Clock) -> None:
    pressure.asked("a", BLOCK)
    assert pressure.blocks_missing(lambda: 0, 0) == 1
    clock.now += 1
    assert pressure.blocks_missing(lambda: 0, 0) is None


def test_reports_keep_a_distance(pressure: Pressure, clock: Clock) -> None:
    reports = []
    for _ in range(11):
        pressure.asked("a", BLOCK)
        reports.append(pressure.blocks_missing(lambda: 0, 0))
        clock.now += REPORT_INTERVAL_SECONDS / 5 + 1e-9
    assert [index for index, report in enumerate(reports) if report] == [0, 5, 10]
