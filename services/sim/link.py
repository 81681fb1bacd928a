"""The link over which an engine reads others' blocks, which may change while it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.sim.latency import Profile


@dataclass
class Link:
    """What an operator has set on one engine, over all of its lives."""

    bytes_per_second: float | None = None
    """None: the profile's; 0: infinite."""
    transfer_seconds: float | None = None
    """What any transfer takes, whatever its size. None: the profile's."""

    def over(self, profile: Profile) -> Profile:
        """The profile with what was set in place of its own figures."""
        if self.bytes_per_second is not None:
            profile = replace(profile, bytes_per_second=self.bytes_per_second)
        if self.transfer_seconds is not None:
            profile = replace(profile, transfer_seconds=self.transfer_seconds)
        return profile
