"""Which legs may start, and how many are running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvloop.errors import UnavailableError
from services.worker.metrics import WorkerMetrics


class Admission:
    """Lets legs in until the worker drains.

    Args:
        metrics: shows the legs in flight.
    """

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self.in_flight = 0
        self.draining = False
        self.drained_busy = False
        """Whether legs were in flight when it began to drain."""

    @contextmanager
    def leg(self) -> Iterator[None]:
        """Count a leg while the block runs.

        Raises:
            UnavailableError: DRAINING, no new legs are taken.
        """
        self.require_open()
        self.in_flight += 1
        self._metrics.legs_in_flight.inc()
        try:
            yield
        finally:
            self.in_flight -= 1
            self._metrics.legs_in_flight.dec()

    def require_open(self) -> None:
        """Refuse if no new legs are taken.

        Raises:
            UnavailableError: DRAINING.
        """
        if self.draining:
            raise UnavailableError("the worker is draining", reason="DRAINING")

    def drain(self) -> None:
        """Take no new legs from now on."""
        self.draining = True
        self.drained_busy = self.in_flight > 0
