"""The memory of processes over time."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.relay.processes import resident_mib
from bench.soak.processes import Service

_SECONDS = 1.0
_LEAST_SECONDS = 30.0
"""Over less than this, a line through samples tells of the start alone."""


@dataclass(frozen=True)
class Sample:
    """The resident memory of one process at one moment."""

    seconds: float
    mib: float
    pid: int


@dataclass
class MemoryWatch:
    """Samples of some processes while they live.

    Attributes:
        samples: by the process's name.
    """

    services: Sequence[Service]
    clock: Callable[[], float]
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    async def run(self) -> None:
        """Take a sample of each process every second, until cancelled."""
        while True:
            for service in self.services:
                if service.up.is_set():
                    self._look(service)
            await asyncio.sleep(_SECONDS)

    def _look(self, service: Service) -> None:
        try:
            mib = resident_mib(service.pid)
        except (FileNotFoundError, ProcessLookupError):
            return  # it has just been killed
        samples = self.samples.setdefault(service.name, [])
        samples.append(Sample(self.clock(), mib, service.pid))


@dataclass(frozen=True)
class Trend:
    """How the memory of one process went.

    Attributes:
        first_mib: when the load was whole.
        last_mib: at its end.
        most_mib: at any time.
        mib_per_minute: slope of the line through the last half of the load.
    """

    first_mib: float
    last_mib: float
    most_mib: float
    mib_per_minute: float


def trend(samples: Sequence[Sample], since: float, until: float) -> Trend | None:
    """The trend between two moments; None if they are too near to each other.

    Args:
        samples: of one process, which lived throughout.
        since: when the load was whole.
        until: when it ended.
    """
    within = [sample for sample in samples if since <= sample.seconds <= until]
    late = [sample for sample in within if sample.seconds >= (since + until) / 2]
    if until - since < _LEAST_SECONDS or len(late) < 3:
        return None
    slope = statistics.linear_regression(
        [sample.seconds for sample in late], [sample.mib for sample in late]
    ).slope
    return Trend(within[0].mib, within[-1].mib, max(sample.mib for sample in within), slope * 60)
