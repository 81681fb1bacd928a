"""A hub with an engine's pins in it and a clock that tests move, for the loops beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from services.worker.event_hub import EventHub
from services.worker.event_messages import Freed, Message, Pins, Renewed, RenewedPin, RetainedPin
from services.worker.metrics import WorkerMetrics
from services.worker.pins import Pin
from services.worker.tasks import background_tasks
from tests.unit.worker.fake_pin_ledger import FakePinLedger
from tests.unit.worker.fakes import ENGINE, FakeLink, finished, hello

_ROUNDS = 50
"""Turns of the event loop after which everything that can go on has done so."""


class SteppedClock:
    """Time that passes only in `advance`."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._moved = asyncio.Event()

    def monotonic(self) -> float:
        """Seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Return once the time has been moved that far."""
        until = self._now + seconds
        while self._now < until:
            await self._moved.wait()

    async def advance(self, seconds: float) -> None:
        """Move the time, in steps, and let everything happen that is due."""
        end = self._now + seconds
        while self._now < end:
            self._now = min(self._now + 0.25, end)
            self._moved.set()
            self._moved = asyncio.Event()
            await self.settle()

    async def settle(self) -> None:
        """Let everything happen that needs no time."""
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)


class PinWorld:
    """The hub, its engine's connection, and a ledger."""

    def __init__(self, **engine: Any) -> None:
        self.clock = SteppedClock()
        self.metrics = WorkerMetrics()
        self.hub = EventHub(self.clock, self.metrics)
        self.link = FakeLink()
        self.ledger = FakePinLedger()
        self.hello = hello(**engine)
        self.hub.connected(self.hello, self.link)

    def retain(self, name: str, *, blocks: int = 2, ttl: float = 60.0, settled: bool = True) -> Pin:
        """A turn ends and its blocks are retained; its commit is done if settled."""
        params = msgspec.json.encode({"remote_request_id": f"req-{name}"})
        with self.hub.watch(name) as watch:
            self.send(
                finished(
                    name,
                    params=msgspec.Raw(params),
                    num_blocks=blocks,
                    num_tokens=blocks * 32,
                    ttl_seconds=ttl,
                )
            )
            watch.claim()
        if settled:
            self.hub.pins.settle(name)
        pin = self.hub.pins.of_turn(name)
        assert pin is not None
        return pin

    def send(self, message: Message) -> None:
        """The connector reports something."""
        self.hub.reported(ENGINE, message)

    def confirm(self) -> None:
        """The engine does and confirms all renewals that it was asked for."""
        asked, self.link.renewed = self.link.renewed, []
        pins = {pin.request_id: pin for pin in self.hub.pins}
        now = self.clock.monotonic()
        self.send(
            Renewed(
                [
                    RenewedPin(
                        request_id,
                        seconds,
                        pins[request_id].extension_seconds
                        + now
                        + seconds
                        - pins[request_id].deadline,
                    )
                    for request_id, seconds in asked
                ]
            )
        )

    def free(self) -> None:
        """The engine frees all that it was told to release."""
        released, self.link.released = self.link.released, []
        self.send(Freed(released))

    def holds(self, *held: RetainedPin) -> None:
        """The engine connects again and says what it holds."""
        self.hub.disconnected(ENGINE, self.link)
        self.hub.connected(self.hello, self.link)
        self.send(Pins(list(held)))

    def sample(self, name: str, **labels: str) -> float | None:
        """A metric."""
        return self.metrics.registry.get_sample_value(f"kvloop_worker_{name}", labels)

    @asynccontextmanager
    async def running(
        self, notice: Callable[[Message], None], loop: Coroutine[Any, Any, None]
    ) -> AsyncIterator[None]:
        """Run a loop beside the hub."""
        self.hub.listen(notice)
        async with background_tasks() as tasks:
            tasks.start(loop, name="loop")
            await self.clock.settle()
            yield
