"""What the engine's connector reports, and who waits for it.

The hub knows which engine is connected, hands each finished turn to the leg that
waits for it, and sees to it that no retained turn is left without an owner: one
that no leg wants is released at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from kvloop.errors import PreconditionError
from services.worker.clock import Clock
from services.worker.event_messages import (
    EngineRef,
    Finished,
    Freed,
    Hello,
    Message,
    Pins,
    Renewed,
    request_id_of,
)
from services.worker.gaps import PauseHistory
from services.worker.metrics import WorkerMetrics
from services.worker.pins import Pin, PinTable, ReleaseCause

_log = structlog.get_logger(__name__)

_MAX_PENDING_RELEASES = 10_000


class EngineLink(Protocol):
    """A connection to one engine's connector."""

    def send_release(self, request_ids: Sequence[str]) -> None:
        """Tell the engine to free these requests' blocks. Does not block."""

    def send_renew(self, leases: Sequence[tuple[str, float]]) -> None:
        """Tell the engine for how many seconds to keep requests' blocks from now on.
        Does not block."""


@dataclass(frozen=True)
class FinishedTurn:
    """A turn that the engine has finished."""

    engine: EngineRef
    retained: bool
    params: bytes
    """The handle, byte for byte."""
    num_tokens: int
    num_blocks: int
    ttl_seconds: float
    received_at: float
    """When the event came, on the sidecar's monotonic clock."""
    renewable_seconds: float = 0.0
    """How long renewals can keep the blocks, from then on; 0: there are none."""


class TurnWatch:
    """A leg's claim to the event of its turn. Made by `EventHub.watch`."""

    def __init__(self, turn_id: str) -> None:
        self.turn_id = turn_id
        self.claimed = False
        self._arrived = asyncio.Event()
        self._turn: FinishedTurn | None = None

    @property
    def turn(self) -> FinishedTurn | None:
        """The finished turn, if its event has come."""
        return self._turn

    async def finished(self) -> FinishedTurn:
        """Wait for the event."""
        while self._turn is None:
            await self._arrived.wait()
        return self._turn

    def claim(self) -> None:
        """Take over the duty to release the turn or to find it an owner."""
        self.claimed = True

    def deliver(self, turn: FinishedTurn) -> bool:
        """Hand the event over; False if there was one already."""
        if self._turn is not None:
            return False
        self._turn = turn
        self._arrived.set()
        return True


class EventHub:
    """Brings together legs and what the connector reports.

    Args:
        clock: stamps events.
        metrics: counts orphans and releases.
        pins: mirrors what the engine retains; a new table if omitted.
    """

    def __init__(self, clock: Clock, metrics: WorkerMetrics, pins: PinTable | None = None) -> None:
        self._clock = clock
        self._metrics = metrics
        self.pins = pins or PinTable(PauseHistory(), metrics)
        self._listeners: list[Callable[[Message], None]] = []
        self._identity: Hello | None = None
        self._changed = asyncio.Event()
        self._links: dict[EngineRef, EngineLink] = {}
        self._watches: dict[str, TurnWatch] = {}
        self._pending: deque[tuple[EngineRef, str]] = deque(maxlen=_MAX_PENDING_RELEASES)

    @property
    def identity(self) -> Hello | None:
        """The engine that said hello last."""
        return self._identity

    async def identity_after(self, known: EngineRef | None) -> Hello:
        """Wait until the engine is another one than the one known."""
        while self._identity is None or self._identity.ref == known:
            await self._changed.wait()
        return self._identity

    def connected(self, hello: Hello, link: EngineLink) -> None:
        """An engine's connector has said hello."""
        self._links[hello.ref] = link
        self.pins.connected(hello.ref, self._clock.monotonic())
        _log.info("engine_connected", engine=hello.engine_id, epoch=hello.epoch)
        if self._identity is None or self._identity.ref != hello.ref:
            self._identity = hello
            self._changed.set()
            self._changed = asyncio.Event()
        mine = [request_id for ref, request_id in self._pending if ref == hello.ref]
        self._pending.clear()  # what was meant for another life is gone with it
        if mine:
            link.send_release(mine)

    def disconnected(self, ref: EngineRef, link: EngineLink) -> None:
        """A connection has ended. The engine may connect again."""
        if self._links.get(ref) is link:
            del self._links[ref]
            _log.info("engine_disconnected", engine=ref.engine_id, epoch=ref.epoch)

    @contextmanager
    def watch(self, turn_id: str) -> Iterator[TurnWatch]:
        """Wait for a turn's event while the block runs.

        Enter it before the engine sees the turn, so that the event cannot come
        too early. Unless the watch is claimed in the block, a retained turn is
        released, whether its event came in the block or comes later.

        Raises:
            PreconditionError: TURN_RUNNING, another leg has this turn id.
        """
        if turn_id in self._watches:
            raise PreconditionError(f"turn {turn_id} is running already", reason="TURN_RUNNING")
        watch = self._watches[turn_id] = TurnWatch(turn_id)
        try:
            yield watch
        finally:
            del self._watches[turn_id]
            if watch.turn is not None and not watch.claimed:
                self._release_orphan(watch.turn, turn_id, ReleaseCause.ABANDONED)

    def listen(self, listener: Callable[[Message], None]) -> None:
        """Call it with every message but hellos, after it has been dealt with here."""
        self._listeners.append(listener)

    def reported(self, ref: EngineRef, message: Message) -> None:
        """An engine's connector has sent something after its hello."""
        now = self._clock.monotonic()
        if isinstance(message, Finished):
            self.finished(ref, message)
        elif self._identity is None or ref != self._identity.ref:
            return  # pins of another life are gone with it
        elif isinstance(message, Pins):
            held_still = self.pins.replace(message.pins, now)
            if held_still:
                self._send_release(ref, [pin.request_id for pin in held_still])
        elif isinstance(message, Renewed):
            self.pins.renewed(message.pins, now)
        elif isinstance(message, Freed):
            self.pins.freed(message.request_ids, now)
        for listener in self._listeners:
            listener(message)

    def finished(self, ref: EngineRef, event: Finished) -> None:
        """A turn has ended in an engine."""
        hello = self._identity if self._identity and self._identity.ref == ref else None
        turn = FinishedTurn(
            engine=ref,
            retained=event.retained,
            params=bytes(event.params),
            num_tokens=event.num_tokens,
            num_blocks=event.num_blocks,
            ttl_seconds=event.ttl_seconds,
            received_at=self._clock.monotonic(),
            renewable_seconds=hello.renewable_seconds if hello else 0.0,
        )
        if hello is not None:
            self._note_pin(turn, event.turn_id)
        watch = self._watches.get(event.turn_id)
        if watch is None or not watch.deliver(turn):
            self._release_orphan(turn, event.turn_id, ReleaseCause.UNKNOWN)

    def release_turn(self, turn: FinishedTurn, cause: ReleaseCause) -> None:
        """Free what a finished turn retains."""
        request_id = request_id_of(turn.params) if turn.retained else None
        if request_id is not None:
            self.release(turn.engine, [request_id], cause)

    def release(self, ref: EngineRef, request_ids: Sequence[str], cause: ReleaseCause) -> None:
        """Tell an engine to free requests' blocks; unknown ids do no harm.

        While its connector is reconnecting, the ids are kept for it.
        """
        self.pins.release(request_ids, cause)
        self._send_release(ref, request_ids)

    def renew(self, ref: EngineRef, leases: Sequence[tuple[str, float]]) -> bool:
        """Tell an engine for how many seconds to keep requests' blocks from now on.

        Returns:
            False if its connector is not connected; a renewal is not kept for later.
        """
        link = self._links.get(ref)
        if link is not None:
            link.send_renew(leases)
        return link is not None

    def _send_release(self, ref: EngineRef, request_ids: Sequence[str]) -> None:
        link = self._links.get(ref)
        if link is not None:
            link.send_release(request_ids)
        else:
            self._pending.extend((ref, request_id) for request_id in request_ids)

    def _note_pin(self, turn: FinishedTurn, turn_id: str) -> None:
        request_id = request_id_of(turn.params) if turn.retained else None
        if request_id is None:
            return
        pin = Pin(
            request_id,
            turn_id,
            turn.num_tokens,
            turn.num_blocks,
            ended_at=turn.received_at,
            deadline=turn.received_at + turn.ttl_seconds,
            in_hand=True,
        )
        self.pins.add(pin, turn.received_at)

    def _release_orphan(self, turn: FinishedTurn, turn_id: str, cause: ReleaseCause) -> None:
        if turn.retained:
            self._metrics.orphan_turns.labels(cause=cause).inc()
            _log.info("orphan_released", turn_id=turn_id, cause=cause, blocks=turn.num_blocks)
            self.release_turn(turn, cause)
