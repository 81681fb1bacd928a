"""Puts together what looks after retained KV on a decode worker."""

from __future__ import annotations

from services.worker.admission import Admission
from services.worker.budget import BlockShares
from services.worker.clock import Clock
from services.worker.engine import Engine
from services.worker.event_hub import EventHub
from services.worker.metrics import WorkerMetrics
from services.worker.pin_ledger import PinLedger
from services.worker.pin_renewal import PinRenewal, RenewalLimits
from services.worker.room import RoomKeeper, RoomRules
from services.worker.settings import WorkerSettings
from services.worker.tasks import BackgroundTasks


def look_after_pins(
    settings: WorkerSettings,
    tasks: BackgroundTasks,
    hub: EventHub,
    ledger: PinLedger,
    engine: Engine,
    admission: Admission,
    clock: Clock,
    metrics: WorkerMetrics,
) -> None:
    """Start the loops that renew pins and make room, as settings say."""
    renewal = PinRenewal(
        hub,
        ledger,
        clock,
        metrics,
        RenewalLimits(
            audit_seconds=settings.pin_lease_seconds / 3,
            settle_seconds=settings.settle_timeout_seconds,
        ),
    )
    room = RoomKeeper(
        hub,
        ledger,
        engine,
        working=lambda: admission.in_flight > 0,
        clock=clock,
        metrics=metrics,
        rules=RoomRules(
            BlockShares(settings.retained_blocks_share, settings.free_blocks_share),
            settings.retention_policy,
            poll_seconds=settings.engine_poll_seconds,
            lost_share=settings.lost_turns_share,
        ),
    )
    for loop, name in ((renewal, "pin-renewal"), (room, "room")):
        hub.listen(loop.notice)
        tasks.start(loop.run(), name=name)
