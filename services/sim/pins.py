"""Blocks kept for another engine after their request has ended.

A pin ends when it is read, when it is released, or at its deadline. Deadlines
are checked whenever someone looks, so an idle engine needs no timer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    turn_id: str = ""
    """Turn that the sidecar knows of; empty if there is none."""
    num_tokens: int = 0
    ended_at: float = 0.0
    """When the request ended, on the engine's clock."""
    extension: float = 0.0
    """Seconds by which the sidecar has moved the deadline."""


class PinTable:
    """All pins of one engine.

    Args:
        pool: where the blocks go back to.
        on_freed: called with pins that have ended.
    """

    def __init__(
        self, pool: BlockPool, on_freed: Callable[[Sequence[Pin]], None] | None = None
    ) -> None:
        self._pool = pool
        self._on_freed = on_freed
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
        self._free([request_id])
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
        self.expired += len(due)
        self._free(due)
        self._check_at = min(self._deadlines(), default=math.inf)

    def _free(self, request_ids: Iterable[str]) -> None:
        freed = [self._pins.pop(request_id) for request_id in request_ids]
        for pin in freed:
            self._pool.release(pin.blocks)
        if freed and self._on_freed is not None:
            self._on_freed(freed)

    def _deadlines(self) -> Iterator[float]:
        return (pin.deadline for pin in self._pins.values() if pin.deadline is not None)
