"""Blocks kept for another engine after their request has ended.

A pin ends when it is read, when it is released, or at its deadline. Deadlines
are checked whenever someone looks, so an idle engine needs no timer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.sim.blocks import BlockPool


@dataclass
class Pin:
    """The blocks of one finished request."""

    request_id: str
    blocks: list[int]
    deadline: float | None
    """On the engine's clock. None: nothing frees the blocks, neither a reader nor a
    release nor time. Stock vLLM loses track like that of a decode request that
    computed its own prompt."""


class PinTable:
    """All pins of one engine.

    Args:
        pool: where the blocks go back to.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pins: dict[str, Pin] = {}
        self._check_at = math.inf  # no deadline comes before this
        self.expired = 0
        """Pins that ended at their deadline, an early release included."""
        self.unknown_notifications = 0
        """Notifications for requests without a pin: whoever sent them may have
        read blocks that belonged to someone else."""

    def add(self, pin: Pin) -> None:
        """Keep blocks. Their user is now the pin."""
        self._pins[pin.request_id] = pin
        if pin.deadline is not None:
            self._check_at = min(self._check_at, pin.deadline)

    def all(self, now: float) -> list[Pin]:
        """Pins that stand."""
        self.expire(now)
        return list(self._pins.values())

    def num_blocks(self) -> int:
        """Blocks under pins, a shared one once per pin."""
        return sum(len(pin.blocks) for pin in self._pins.values())

    def next_deadline(self) -> float | None:
        """When the next pin falls."""
        return min(self._deadlines(), default=None)

    def notify(self, request_id: str, now: float) -> bool:
        """A reader is done: free the blocks. False if there is no such pin."""
        self.expire(now)
        pin = self._pins.get(request_id)
        if pin is None or pin.deadline is None:
            self.unknown_notifications += 1
            return False
        self._pool.release(self._pins.pop(request_id).blocks)
        return True

    def renew(self, request_ids: Iterable[str], until: float, now: float) -> None:
        """Move deadlines; never to an earlier time. Unknown requests are ignored."""
        self.expire(now)
        for request_id in request_ids:
            pin = self._pins.get(request_id)
            if pin is not None and pin.deadline is not None:
                pin.deadline = max(pin.deadline, until)

    def release(self, request_ids: Iterable[str], now: float) -> None:
        """Let deadlines come now. Unknown requests are ignored."""
        for request_id in request_ids:
            pin = self._pins.get(request_id)
            if pin is not None and pin.deadline is not None:
                pin.deadline = self._check_at = now
        self.expire(now)

    def expire(self, now: float) -> None:
        """Free the blocks of all pins whose deadline has come."""
        if now < self._check_at:
            return
        due = [
            pin.request_id
            for pin in self._pins.values()
            if pin.deadline is not None and pin.deadline <= now
        ]
        for request_id in due:
            self.expired += 1
            self._pool.release(self._pins.pop(request_id).blocks)
        self._check_at = min(self._deadlines(), default=math.inf)

    def _deadlines(self) -> Iterator[float]:
        return (pin.deadline for pin in self._pins.values() if pin.deadline is not None)
