"""Pins as leases: what the connector and the sidecar tell each other about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from services.sim.pins import Pin, PinTable

_NEARLY_DUE_SECONDS = 2.0
"""Deadlines nearer than this are not moved any more."""
_PRESSURE_SECONDS = 0.05
"""Between two events that say that blocks are lacking."""


class Leases:
    """Renews pins as the sidecar asks, and reports what becomes of them.

    Pins of requests that belong to no turn are not spoken of.

    Args:
        pins: the engine's pins.
        now: the engine's clock.
        send: takes events for the sidecar.
    """

    def __init__(
        self, pins: PinTable, now: Callable[[], float], send: Callable[[dict[str, Any]], None]
    ) -> None:
        self._pins = pins
        self._now = now
        self._send = send
        self._pressure_due = 0.0

    def snapshot(self) -> dict[str, Any]:
        """All that is retained now; sent after each hello."""
        now = self._now()
        return {
            "type": "pins",
            "pins": [
                {
                    "request_id": pin.request_id,
                    "turn_id": pin.turn_id,
                    "num_tokens": pin.num_tokens,
                    "num_blocks": len(pin.blocks),
                    "remaining_seconds": pin.deadline - now,
                    "extension_seconds": pin.extension,
                    "age_seconds": now - pin.ended_at,
                }
                for pin in self._pins.all(now)
                if pin.turn_id and pin.deadline is not None
            ],
        }

    def renew(self, leases: Sequence[tuple[str, float]]) -> None:
        """Move deadlines, each to so many seconds from now, and confirm."""
        now = self._now()
        standing = {pin.request_id: pin for pin in self._pins.all(now)}
        renewed = []
        for request_id, seconds in leases:
            pin = standing.get(request_id)
            if pin is None or pin.deadline is None or pin.deadline < now + _NEARLY_DUE_SECONDS:
                continue
            pin.extension += max(now + seconds - pin.deadline, 0.0)
            pin.deadline = max(pin.deadline, now + seconds)
            renewed.append(
                {
                    "request_id": request_id,
                    "remaining_seconds": pin.deadline - now,
                    "extension_seconds": pin.extension,
                }
            )
        if renewed:
            self._send({"type": "renewed", "pins": renewed})

    def freed(self, pins: Sequence[Pin]) -> None:
        """Pins have ended: read, released or expired."""
        request_ids = [pin.request_id for pin in pins if pin.turn_id]
        if request_ids:
            self._send({"type": "freed", "request_ids": request_ids})

    def press(self, lacking_blocks: int) -> float | None:
        """Say that a request waits for blocks, if something is retained.

        Returns:
            When to say it again if it still waits, on the engine's clock; None if there
            is nothing to say.
        """
        if not lacking_blocks or not any(pin.turn_id for pin in self._pins.all(self._now())):
            return None
        now = self._now()
        if now >= self._pressure_due:
            self._pressure_due = now + _PRESSURE_SECONDS
            self._send({"type": "pressure", "blocks_needed": lacking_blocks})
        return self._pressure_due
