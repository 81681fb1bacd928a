"""The ledger's clock: time that neither steps nor stops for a restart.

See docs/adr/0002-ledger-clock.md for why it is none of the system's clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SLEW_US = 1_000_000  # a wall clock may be set back this much in daily life


class Clock(Protocol):
    """Microseconds of the ledger's time, near to Unix time when it was first set."""

    def now_us(self) -> int:
        """The time now. Never less than an earlier answer. Callable in any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """The clocks of one machine at one moment."""

    wall_us: int
    """Unix time, which may have been stepped."""
    boot_id: str
    """This life of the machine's kernel; empty if it cannot be known."""
    uptime_us: int
    """Time since boot, suspension included; it is never stepped."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The ledger's time and the clocks beside it, stored every second or so."""

    ledger_us: int
    reading: Reading


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where the ledger's time goes on.

    `continuous` is False if the time since the mark is not known, or if the
    last changes before it may be lost: nothing given out then can be trusted.
    """

    ledger_us: int
    continuous: bool


class Marks(Protocol):
    """Where the ledger's time is kept between two lives of the ledger."""

    async def load(self) -> tuple[Mark | None, Reading]:
        """The stored mark, and the clocks it is to be compared with now."""
        ...

    async def save(self, clock: Clock) -> int:
        """Store the ledger's time, and the clocks beside it, if it is the highest.

        Returns:
            The highest, which another replica may have stored.
        """
        ...


class HostTime:
    """The clocks of this machine."""

    def uptime_us(self) -> int:
        """Microseconds on a clock that is never stepped."""
        clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return time.clock_gettime_ns(clock) // 1000

    def reading(self) -> Reading:
        """All clocks at this moment."""
        boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        return Reading(time.time_ns() // 1000, boot_id, self.uptime_us())


class LedgerClock:
    """The ledger's time in this process: an anchor plus time that never steps.

    Args:
        ledger_us: the ledger's time at one moment.
        at_uptime_us: the uptime at that moment.
        uptime_us: reads the uptime.
    """

    def __init__(self, ledger_us: int, at_uptime_us: int, uptime_us: Callable[[], int]) -> None:
        self._uptime_us = uptime_us
        self._offset_us = ledger_us - at_uptime_us

    def now_us(self) -> int:
        """The time now; see Clock."""
        return self._offset_us + self._uptime_us()

    def advance_to(self, ledger_us: int) -> None:
        """Go on from a later time, which another replica has reached."""
        self._offset_us = max(self._offset_us, ledger_us - self._uptime_us())


def resume_on_same_host(mark: Mark | None, now: Reading) -> Resumption:
    """Go on after a restart beside the database file.

    Within one life of the kernel its uptime tells exactly how long the ledger
    was away, and the page cache has kept every committed change. After a
    reboot neither holds.
    """
    if mark is None:
        return Resumption(now.wall_us, continuous=True)
    then = mark.reading
    if now.boot_id and now.boot_id == then.boot_id and now.uptime_us >= then.uptime_us:
        return Resumption(mark.ledger_us + now.uptime_us - then.uptime_us, continuous=True)
    return Resumption(mark.ledger_us + max(0, now.wall_us - then.wall_us), continuous=False)


def resume_by_wall(mark: Mark | None, now: Reading) -> Resumption:
    """Go on, or join other replicas, by the wall clock of a database server.

    Only a step between the last mark and now can be seen in the difference:
    forwards it counts as time away; backwards it leaves that time unknown.
    """
    if mark is None:
        return Resumption(now.wall_us, continuous=True)
    away = now.wall_us - mark.reading.wall_us
    return Resumption(mark.ledger_us + max(0, away), continuous=away >= -_SLEW_US)
