"""Renews what the ledger still wants, and lets go of what it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

from kvloop.errors import KvloopError
from services.common.backoff import Backoff
from services.worker.clock import Clock
from services.worker.event_hub import EventHub
from services.worker.event_messages import EngineRef, Hello, Message, Pins, Renewed
from services.worker.metrics import WorkerMetrics
from services.worker.pin_ledger import PinLedger, PinReport, PinVerdict, Verdict
from services.worker.pins import Pin, ReleaseCause, Standing
from services.worker.race import wait_or_sleep

_log = structlog.get_logger(__name__)

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 5.0
_PAST_WANTED_SECONDS = 10.0
"""How much longer blocks are kept than their conversation wants them, so that
neither the ledger's margin nor the prefill engine's shortens what it gets."""


@dataclass(frozen=True)
class RenewalLimits:
    """Times of the renewal loop."""

    audit_seconds: float
    """Between two audits of pins that cannot be renewed."""
    settle_seconds: float
    """Age below which a pin that the ledger does not know is no orphan: its commit
    may still be under way."""


def lease_seconds(
    pin: Pin, wanted_seconds: float, *, pin_lease_seconds: float, now: float
) -> float | None:
    """For how long to renew a pin from now on; None if it is not worth it yet.

    A full lease is given once a sixth of the one before has run, so that with a
    round in every third at least half of a lease is left at any time. Towards the
    end a pin gets what its conversation still wants.
    """
    lease = min(pin_lease_seconds, wanted_seconds + _PAST_WANTED_SECONDS)
    worth_it = pin_lease_seconds / 6 if lease == pin_lease_seconds else 0.0
    return lease if now + lease > pin.deadline + worth_it else None


class PinRenewal:
    """The loop that keeps pins for as long as the ledger wants them.

    In each third of a lease it tells the ledger all that is retained, and has the
    engine renew what is wanted. When the engine has confirmed the new deadlines, the
    ledger is told again: it never promises what the engine has not confirmed. When
    either cannot be reached, nothing is renewed and pins fall within a lease.

    Pins that cannot be renewed are audited all the same.

    Args:
        hub: knows the pins and reaches the engine. Its messages must be passed to
            `notice`.
        ledger: says what is wanted.
        clock: paces rounds.
        metrics: counts renewals.
        limits: times.
    """

    def __init__(
        self,
        hub: EventHub,
        ledger: PinLedger,
        clock: Clock,
        metrics: WorkerMetrics,
        limits: RenewalLimits,
    ) -> None:
        self._hub = hub
        self._ledger = ledger
        self._clock = clock
        self._metrics = metrics
        self._limits = limits
        self._wake = asyncio.Event()
        self._confirmed: set[str] = set()
        self._due = clock.monotonic()

    def notice(self, message: Message) -> None:
        """Take in what the engine has sent."""
        if isinstance(message, Renewed):
            self._metrics.renewals.inc(len(message.pins))
            self._confirmed.update(pin.request_id for pin in message.pins)
            self._wake.set()
        elif isinstance(message, Pins):
            self._due = self._clock.monotonic()
            self._wake.set()

    async def run(self) -> None:
        """Renew until cancelled. Outages are waited out."""
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS)
        while True:
            left = max(self._due - self._clock.monotonic(), 0.0)
            await wait_or_sleep(self._wake, self._clock, left)
            self._wake.clear()
            try:
                await self._step()
                backoff.reset()
            except KvloopError as error:
                self._metrics.audits_failed.labels(reason=error.reason).inc()
                _log.warning("pins_not_audited", reason=error.reason, error=error.message)
                self._due = self._clock.monotonic() + backoff.next_seconds()

    async def _step(self) -> None:
        hello = self._hub.identity
        now = self._clock.monotonic()
        if hello is None:
            self._due = now + self._limits.audit_seconds
            return
        confirmed, self._confirmed = self._confirmed, set()
        if now >= self._due:
            self._hub.pins.forget_overdue(now)
            verdicts = await self._audit(hello.ref, self._hub.pins)
            self._due = now + self._interval(hello)
            self._renew(hello, verdicts)
        elif confirmed:
            pins = [pin for pin in self._hub.pins if pin.request_id in confirmed]
            await self._audit(hello.ref, pins)

    def _interval(self, hello: Hello) -> float:
        return hello.pin_lease_seconds / 3 if hello.lease_renewal else self._limits.audit_seconds

    async def _audit(self, engine: EngineRef, pins: Iterable[Pin]) -> Sequence[PinVerdict]:
        """Tell the ledger about pins, and do what it says except renewing."""
        now = self._clock.monotonic()
        reports = [
            PinReport(pin.turn_id, pin.deadline - now, pin.extension_seconds)
            for pin in pins
            # Without a turn it belongs to someone who uses the engine directly.
            if pin.turn_id and not pin.in_hand and not pin.releasing and pin.deadline > now
        ]
        if not reports:
            return []
        verdicts = await self._ledger.audit(engine, reports)
        unwanted: list[str] = []
        for verdict in verdicts:
            pin = self._hub.pins.of_turn(verdict.turn_id)
            if pin is None or pin.in_hand or pin.releasing:
                continue
            if verdict.verdict is Verdict.RELEASE:
                unwanted.append(pin.request_id)
            else:
                self._judge(pin, verdict)
        if unwanted:
            _log.info("unwanted_pins_released", pins=len(unwanted))
            self._hub.release(engine, unwanted, ReleaseCause.UNWANTED)
        return verdicts

    def _judge(self, pin: Pin, verdict: PinVerdict) -> None:
        now = self._clock.monotonic()
        standing, wanted_until = Standing.IN_USE, None
        if verdict.verdict is Verdict.WANTED:
            standing, wanted_until = Standing.WANTED, now + verdict.wanted_seconds
        elif verdict.verdict is Verdict.UNOWNED:
            young = now - pin.ended_at < self._limits.settle_seconds
            standing = Standing.UNKNOWN if young else Standing.ORPHAN
            if standing is not pin.standing and standing is Standing.ORPHAN:
                _log.warning("orphan_pin", turn_id=pin.turn_id, blocks=pin.num_blocks)
        self._hub.pins.judge(pin, standing, tenant=verdict.tenant, wanted_until=wanted_until)

    def _renew(self, hello: Hello, verdicts: Sequence[PinVerdict]) -> None:
        if not hello.lease_renewal:
            return
        now = self._clock.monotonic()
        leases: list[tuple[str, float]] = []
        for verdict in verdicts:
            pin = self._hub.pins.of_turn(verdict.turn_id)
            if pin is None or pin.releasing or verdict.verdict is not Verdict.WANTED:
                continue
            lease = lease_seconds(
                pin, verdict.wanted_seconds, pin_lease_seconds=hello.pin_lease_seconds, now=now
            )
            if lease is not None:
                leases.append((pin.request_id, lease))
        if leases and not self._hub.renew(hello.ref, leases):
            _log.warning("engine_not_connected", unrenewed_pins=len(leases))
