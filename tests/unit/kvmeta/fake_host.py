"""A machine whose clocks do what a test says."""

from __future__ import annotations

from services.kvmeta.clock import HostTime, Reading


class FakeHost(HostTime):
    """Time passes on both clocks; the wall clock can be stepped; it can reboot."""

    def __init__(self) -> None:
        self.wall_us = 1_800_000_000_000_000
        self.up_us = 5_000_000_000
        self.boot_id = "boot-1"

    def uptime_us(self) -> int:
        return self.up_us

    def reading(self) -> Reading:
        return Reading(self.wall_us, self.boot_id, self.up_us)

    def advance(self, seconds: float) -> None:
        self.wall_us += round(seconds * 1e6)
        self.up_us += round(seconds * 1e6)

    def step_wall(self, seconds: float) -> None:
        self.wall_us += round(seconds * 1e6)

    def reboot(self, seconds: float) -> None:
        self.wall_us += round(seconds * 1e6)
        self.up_us = 1_000_000
        self.boot_id += "+"
