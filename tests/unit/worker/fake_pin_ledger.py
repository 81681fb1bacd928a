"""A ledger that knows about pins what tests tell it."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.event_messages import EngineRef
from services.worker.pin_ledger import PinReport, PinVerdict, Verdict


class FakePinLedger:
    """Implements PinLedger. Turns that it was not told of are unowned."""

    def __init__(self) -> None:
        self.known: dict[str, PinVerdict] = {}
        self.audits: list[list[PinReport]] = []
        self.evictions: list[list[str]] = []
        self.error: Exception | None = None

    def knows(
        self,
        turn_id: str,
        verdict: Verdict,
        *,
        wanted_seconds: float = 0.0,
        tenant: str = "default",
    ) -> None:
        """Set what becomes of a turn's pin."""
        self.known[turn_id] = PinVerdict(turn_id, verdict, wanted_seconds, tenant)

    async def audit(self, engine: EngineRef, pins: Sequence[PinReport]) -> Sequence[PinVerdict]:
        self.audits.append(list(pins))
        if self.error is not None:
            raise self.error
        return [
            self.known.get(pin.turn_id, PinVerdict(pin.turn_id, Verdict.UNOWNED)) for pin in pins
        ]

    async def evict(self, engine: EngineRef, turn_ids: Sequence[str]) -> Sequence[str]:
        self.evictions.append(list(turn_ids))
        if self.error is not None:
            raise self.error
        evicted = [
            turn_id
            for turn_id in turn_ids
            if turn_id in self.known and self.known[turn_id].verdict is Verdict.WANTED
        ]
        for turn_id in evicted:
            self.knows(turn_id, Verdict.RELEASE)
        return evicted
