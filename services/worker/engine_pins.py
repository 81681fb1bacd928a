"""What a decode engine retains, and until when: the engine's own book of its pins.

vLLM's workers drop the blocks of a finished turn when its deadline comes. A renewal
travels to them with a scheduling step, so it may come too late: a step that began
before it may drop the blocks. Whoever trusts a renewal that came too late lets
another engine read blocks that belong to another request by then. So a deadline
counts as moved only once the outcome of every such step is known.

Only the standard library is used: this module runs inside vLLM's scheduler.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

RENEWAL_MARGIN_SECONDS = 2.0
"""A deadline that is nearer than this is not moved any more."""


@dataclass
class Pin:
    """The retained blocks of one finished turn. Times are on the book's clock."""

    request_id: str
    """The engine's name for the request; names the blocks, too."""
    turn_id: str
    """The sidecar's name for the turn; empty if it has none."""
    num_tokens: int
    num_blocks: int
    retained_at: float
    first_deadline: float
    """As written into the handle."""
    deadline: float
    """Up to here the blocks are surely kept, unless they are read or released."""
    asked: float
    """The latest deadline that the workers were told."""
    releasing: bool = False
    """True once the workers were told to drop the blocks; nothing revokes that."""


class EnginePins:
    """The pins of one engine.

    The scheduler's thread calls everything; `snapshot` may be called from any.

    Args:
        clock: seconds on the clock of vLLM's own deadlines.
        steps_in_flight: how many steps the engine schedules at most before it has
            processed the output of the first of them.
        longest_lease_seconds: no renewal reaches further than this; the engine's
            own TTL.
    """

    def __init__(
        self, clock: Callable[[], float], *, steps_in_flight: int, longest_lease_seconds: float
    ) -> None:
        self._clock = clock
        self._steps_in_flight = steps_in_flight
        self._longest_lease_seconds = longest_lease_seconds
        self._lock = threading.Lock()
        self._pins: dict[str, Pin] = {}
        self._step = 0
        self._unconfirmed: collections.deque[tuple[int, str, float]] = collections.deque()

    def __len__(self) -> int:
        return len(self._pins)

    def retain(
        self, request_id: str, turn_id: str, *, num_tokens: int, num_blocks: int, deadline: float
    ) -> None:
        """Enter a turn that has just ended."""
        now = self._clock()
        with self._lock:
            self._pins[request_id] = Pin(
                request_id, turn_id, num_tokens, num_blocks, now, deadline, deadline, deadline
            )

    def begin_step(self) -> list[dict[str, Any]]:
        """Count a step, before it takes anything to the workers.

        Returns:
            The renewals that have become certain, as in the event "renewed".
        """
        self._step += 1
        confirmed: dict[str, Pin] = {}
        with self._lock:
            while (
                self._unconfirmed and self._unconfirmed[0][0] + self._steps_in_flight <= self._step
            ):
                _, request_id, deadline = self._unconfirmed.popleft()
                pin = self._pins.get(request_id)
                if pin is None or pin.releasing:
                    continue
                pin.deadline = max(pin.deadline, deadline)
                confirmed[request_id] = pin
        now = self._clock()
        return [
            {
                "request_id": pin.request_id,
                "remaining_seconds": pin.deadline - now,
                "extension_seconds": pin.deadline - pin.first_deadline,
            }
            for pin in confirmed.values()
        ]

    def renew(self, leases: Iterable[tuple[str, float]]) -> dict[str, float]:
        """Deadlines for the workers, to go out with the current step.

        Unknown pins, and those that are due or being released, are left out. A
        deadline never comes nearer.

        Args:
            leases: engine request ids, and seconds from now.
        """
        now = self._clock()
        deadlines: dict[str, float] = {}
        with self._lock:
            for request_id, seconds in leases:
                pin = self._pins.get(request_id)
                if pin is None or pin.releasing or pin.deadline - now < RENEWAL_MARGIN_SECONDS:
                    continue
                pin.asked = max(pin.asked, now + min(seconds, self._longest_lease_seconds))
                deadlines[request_id] = pin.asked
                self._unconfirmed.append((self._step, request_id, pin.asked))
        return deadlines

    def release(self, request_ids: Iterable[str]) -> list[str]:
        """The pins among these requests, which the workers are to drop in the current step.

        Unknown requests are left out: one of them might be running.
        """
        with self._lock:
            found = [
                self._pins[request_id] for request_id in request_ids if request_id in self._pins
            ]
            for pin in found:
                pin.releasing = True
        return [pin.request_id for pin in found]

    def freed(self, request_ids: Iterable[str]) -> list[str]:
        """Strike out what the workers have dropped; returns the pins among it."""
        with self._lock:
            return [
                request_id
                for request_id in request_ids
                if self._pins.pop(request_id, None) is not None
            ]

    def snapshot(self) -> list[dict[str, Any]]:
        """All pins, as in the event "pins"."""
        now = self._clock()
        with self._lock:
            return [
                {
                    "request_id": pin.request_id,
                    "turn_id": pin.turn_id,
                    "num_tokens": pin.num_tokens,
                    "num_blocks": pin.num_blocks,
                    "remaining_seconds": pin.deadline - now,
                    "extension_seconds": pin.deadline - pin.first_deadline,
                    "age_seconds": now - pin.retained_at,
                }
                for pin in self._pins.values()
            ]
