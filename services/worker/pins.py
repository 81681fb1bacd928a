"""What the engine retains, as its connector has told. No time passes here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from services.worker.event_messages import EngineRef, RenewedPin, RetainedPin
from services.worker.gaps import PauseHistory
from services.worker.metrics import WorkerMetrics

_OVERDUE_SECONDS = 10.0
"""How long after its deadline a pin is forgotten that nobody reported as freed."""
_NEARLY_DUE_SECONDS = 1.0
"""A pin that goes this shortly before its deadline has fallen, and was not read."""


class Standing(StrEnum):
    """What the ledger says of a pin."""

    UNKNOWN = "unknown"
    """It has not been asked, or not to any effect."""
    WANTED = "wanted"
    IN_USE = "in_use"
    ORPHAN = "orphan"
    """No ledger row owns it, and no commit is under way that might make one."""


class ReleaseCause(StrEnum):
    """Why the engine was told to free blocks. Also a metric label."""

    ENDED = "ended"
    """The conversation was ended."""
    SUPERSEDED = "superseded"
    """A newer turn is stored."""
    EXPIRED = "expired"
    """The ledger's deadline has passed."""
    BUDGET = "budget"
    """Room was needed."""
    LEASE_ENDED = "lease_ended"
    """The worker had lost its place in the registry."""
    UNWANTED = "unwanted"
    """The ledger, asked about the pin, wants it no longer."""
    NOT_STORED = "not_stored"
    """The ledger surely did not take the handle."""
    ABANDONED = "abandoned"
    """The turn's leg ended without a commit."""
    UNKNOWN = "unknown"
    """No leg waited for the turn."""
    REQUESTED = "requested"
    """ReleaseBlocks was called."""
    OTHER = "other"
    """The ledger gave a cause that this version does not know."""


@dataclass
class Pin:
    """The retained KV of one finished turn. Times are on the sidecar's clock."""

    request_id: str
    turn_id: str
    """Empty if its request did not come from a sidecar."""
    num_tokens: int
    num_blocks: int
    ended_at: float
    """When its turn ended."""
    deadline: float
    """When the engine drops the blocks by itself."""
    extension_seconds: float = 0.0
    """By how much the deadline was moved since the turn ended."""
    tenant: str = ""
    """Empty until it is known."""
    wanted_until: float | None = None
    """When the ledger will stop wanting it; None until it is known."""
    standing: Standing = Standing.UNKNOWN
    in_hand: bool = False
    """A leg or a commit here still decides what becomes of it."""
    releasing: bool = False
    """The engine has been told to free it."""


class PinTable:
    """Mirrors the pins of the engine that is connected.

    Args:
        pauses: learns how long conversations pause.
        metrics: shows what is retained.
    """

    def __init__(self, pauses: PauseHistory, metrics: WorkerMetrics) -> None:
        self.pauses = pauses
        self._metrics = metrics
        self._engine: EngineRef | None = None
        self._pins: dict[str, Pin] = {}
        self._by_turn: dict[str, Pin] = {}
        self._orphans: set[str] = set()
        self._counted_until = 0.0
        self.retained_blocks = 0
        """Blocks under pins; one that several pins share counts for each."""
        self.releasing_blocks = 0
        """Those of pins that the engine has been told to free."""

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    @property
    def num_orphans(self) -> int:
        """Pins that no ledger row owns."""
        return len(self._orphans)

    def of_turn(self, turn_id: str) -> Pin | None:
        """The pin that a turn has left behind."""
        return self._by_turn.get(turn_id)

    # ---- what the engine says ----------------------------------------------

    def connected(self, engine: EngineRef, now: float) -> None:
        """An engine has connected; another life of it has none of the old one's pins."""
        if engine != self._engine:
            self._engine = engine
            with self._counting(now):
                for pin in list(self._pins.values()):
                    self._drop(pin)

    def add(self, pin: Pin, now: float) -> None:
        """A turn has ended and its blocks are retained."""
        known = self._pins.get(pin.request_id)
        if known is not None:  # from a list that came before its event
            known.in_hand = pin.in_hand
            return
        with self._counting(now):
            self._put(pin)

    def replace(self, held: Sequence[RetainedPin], now: float) -> list[Pin]:
        """Take over what an engine that has connected says it holds.

        Returns:
            Pins that it was told to free and still holds: the line was lost.
        """
        said = {pin.request_id: pin for pin in held}
        with self._counting(now):
            for pin in [pin for pin in self._pins.values() if pin.request_id not in said]:
                self._drop(pin)
            for request_id, holds in said.items():
                if request_id not in self._pins:
                    self._put(_pin_of(holds, now))
                self._pins[request_id].deadline = now + holds.remaining_seconds
                self._pins[request_id].extension_seconds = holds.extension_seconds
        return [pin for pin in self._pins.values() if pin.releasing]

    def renewed(self, confirmed: Iterable[RenewedPin], now: float) -> None:
        """The engine has moved deadlines."""
        for said in confirmed:
            if (pin := self._pins.get(said.request_id)) is not None:
                pin.deadline = now + said.remaining_seconds
                pin.extension_seconds = said.extension_seconds

    def freed(self, request_ids: Iterable[str], now: float) -> None:
        """Blocks have come free. What was neither released nor due has been read."""
        with self._counting(now):
            for pin in [self._pins[one] for one in request_ids if one in self._pins]:
                self._drop(pin)
                silent = max(now - pin.ended_at, 0.0)
                if pin.releasing or now >= pin.deadline - _NEARLY_DUE_SECONDS:
                    self.pauses.cut_short(pin.tenant, silent)
                else:
                    self.pauses.returned(pin.tenant, silent)

    def forget_overdue(self, now: float) -> None:
        """Drop pins whose deadline is long past: the event that said so was lost."""
        with self._counting(now):
            for pin in list(self._pins.values()):
                if now > pin.deadline + _OVERDUE_SECONDS:
                    self._drop(pin)

    # ---- what is decided about pins ----------------------------------------

    def release(self, request_ids: Iterable[str], cause: ReleaseCause) -> None:
        """The engine is being told to free these; each is counted once."""
        for request_id in request_ids:
            pin = self._pins.get(request_id)
            if pin is not None and not pin.releasing:
                self._metrics.releases.labels(cause=cause).inc()
                pin.releasing = True
                self.releasing_blocks += pin.num_blocks
                self._stand(pin, Standing.UNKNOWN)

    def settle(self, turn_id: str, tenant: str = "") -> None:
        """Nothing here decides about the turn any more: it is stored, or will never be."""
        if (pin := self._by_turn.get(turn_id)) is not None:
            pin.in_hand = False
            pin.tenant = tenant or pin.tenant

    def judge(
        self, pin: Pin, standing: Standing, *, tenant: str = "", wanted_until: float | None = None
    ) -> None:
        """Note what the ledger says of a pin."""
        if pin.request_id in self._pins and not pin.releasing:
            pin.tenant = tenant or pin.tenant
            pin.wanted_until = wanted_until
            self._stand(pin, standing)

    # ------------------------------------------------------------------------

    def _stand(self, pin: Pin, standing: Standing) -> None:
        if standing is Standing.ORPHAN and pin.standing is not Standing.ORPHAN:
            self._orphans.add(pin.request_id)
            self._metrics.orphans_found.inc()
        elif standing is not Standing.ORPHAN:
            self._orphans.discard(pin.request_id)
        pin.standing = standing
        self._metrics.orphan_pins.set(len(self._orphans))

    def _put(self, pin: Pin) -> None:
        self._pins[pin.request_id] = pin
        if pin.turn_id:
            self._by_turn.setdefault(pin.turn_id, pin)
        self.retained_blocks += pin.num_blocks

    def _drop(self, pin: Pin) -> None:
        del self._pins[pin.request_id]
        if self._by_turn.get(pin.turn_id) is pin:
            del self._by_turn[pin.turn_id]
        self.retained_blocks -= pin.num_blocks
        if pin.releasing:
            self.releasing_blocks -= pin.num_blocks
        self._orphans.discard(pin.request_id)

    @contextmanager
    def _counting(self, now: float) -> Iterator[None]:
        """Count the time that blocks were retained, and show what is afterwards."""
        elapsed = max(now - self._counted_until, 0.0)
        self._metrics.retained_block_seconds.inc(self.retained_blocks * elapsed)
        self._counted_until = now
        yield
        self._metrics.retained_pins.set(len(self._pins))
        self._metrics.retained_blocks.set(self.retained_blocks)
        self._metrics.orphan_pins.set(len(self._orphans))


def _pin_of(held: RetainedPin, now: float) -> Pin:
    return Pin(
        request_id=held.request_id,
        turn_id=held.turn_id,
        num_tokens=held.num_tokens,
        num_blocks=held.num_blocks,
        ended_at=now - held.age_seconds,
        deadline=now + held.remaining_seconds,
    )
