"""The ledger's time neither steps with the wall clock nor stops for a restart."""

from __future__ import annotations

import pytest

from services.kvmeta.clock import (
    HostTime,
    LedgerClock,
    Mark,
    Reading,
    resume_by_wall,
    resume_on_same_host,
)
from tests.unit.kvmeta.fake_host import FakeHost

HOUR = 3600
DAY_US = 86_400_000_000


def started(host: FakeHost) -> LedgerClock:
    return LedgerClock(host.wall_us, host.up_us, host.uptime_us)


@pytest.mark.parametrize("step", [-10 * HOUR, 10 * HOUR])
def test_a_step_of_the_wall_clock_is_not_seen(step) -> None:
    host = FakeHost()
    clock = started(host)
    before = clock.now_us()
    host.step_wall(step)
    assert clock.now_us() == before
    host.advance(1)
    assert clock.now_us() == before + 1_000_000


def test_the_clock_follows_the_highest_replica_and_never_goes_back() -> None:
    clock = started(FakeHost())
    now = clock.now_us()
    clock.advance_to(now - 1)
    assert clock.now_us() == now
    clock.advance_to(now + 5)
    assert clock.now_us() == now + 5


def test_the_first_start_is_at_the_wall_clocks_time() -> None:
    host = FakeHost()
    for resume in (resume_on_same_host, resume_by_wall):
        resumed = resume(None, host.reading())
        assert (resumed.ledger_us, resumed.continuous) == (host.wall_us, True)


@pytest.mark.parametrize("step", [-10 * HOUR, 0, 10 * HOUR])
def test_a_restart_counts_the_time_away_exactly_whatever_the_wall_clock_did(step) -> None:
    host = FakeHost()
    mark = Mark(42, host.reading())
    host.step_wall(step)
    host.advance(90)
    resumed = resume_on_same_host(mark, host.reading())
    assert (resumed.ledger_us, resumed.continuous) == (42 + 90_000_000, True)


@pytest.mark.parametrize(("away", "counted"), [(90, 90), (-10 * HOUR, 0)])
def test_a_reboot_is_not_trusted(away, counted) -> None:
    host = FakeHost()
    mark = Mark(42, host.reading())
    host.reboot(away)
    resumed = resume_on_same_host(mark, host.reading())
    assert (resumed.ledger_us, resumed.continuous) == (42 + counted * 1_000_000, False)


def test_a_machine_without_a_boot_id_is_not_trusted() -> None:
    host = FakeHost()
    host.boot_id = ""
    mark = Mark(42, host.reading())
    host.advance(1)
    assert not resume_on_same_host(mark, host.reading()).continuous


@pytest.mark.parametrize("before_the_mark", [-10 * HOUR, 0, 10 * HOUR])
def test_a_server_whose_clock_was_stepped_before_the_last_mark_does_no_harm(
    before_the_mark,
) -> None:
    host = FakeHost()
    host.step_wall(before_the_mark)
    mark = Mark(42, host.reading())
    host.advance(90)
    resumed = resume_by_wall(mark, host.reading())
    assert (resumed.ledger_us, resumed.continuous) == (42 + 90_000_000, True)


def test_a_server_whose_clock_went_back_while_nobody_looked_is_not_trusted() -> None:
    host = FakeHost()
    mark = Mark(42, host.reading())
    host.step_wall(-60)
    assert resume_by_wall(mark, host.reading()).continuous is False
    assert resume_by_wall(mark, host.reading()).ledger_us == 42


def test_a_server_whose_clock_is_slewed_back_a_little_is_trusted() -> None:
    host = FakeHost()
    mark = Mark(42, host.reading())
    host.step_wall(-0.01)
    assert resume_by_wall(mark, host.reading()).continuous is True


def test_the_hosts_clocks_are_read_as_microseconds() -> None:
    host = HostTime()
    reading = host.reading()
    assert isinstance(reading, Reading)
    assert reading.wall_us > 20_000 * DAY_US  # after 2024
    assert 0 < reading.uptime_us < 10_000 * DAY_US
    assert reading.boot_id == HostTime().reading().boot_id
    assert host.uptime_us() >= reading.uptime_us
