"""Which turns may run now, which wait, and which are turned away.

Limits are those of one router: several replicas admit as many times as much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from limits import RateLimitItem
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter

from kvloop.errors import RETRY_AFTER, LimitError, UnavailableError


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits per model and tenant."""

    running: int
    """Turns that run at once; 0: any number."""
    waiting: int
    """Turns that wait for one to end."""
    wait_seconds: float
    """How long a turn waits at most."""
    rates: tuple[RateLimitItem, ...] = ()
    """Turns of one tenant per period, over all models."""


@dataclass
class _Lane:
    """The turns of one tenant for one model."""

    running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class TurnAdmission:
    """Admits turns, in the order in which they came.

    Args:
        limits: how many.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._running = 0
        self._rates = MovingWindowRateLimiter(MemoryStorage()) if limits.rates else None

    @property
    def running(self) -> int:
        """Turns that run now."""
        return self._running

    @property
    def waiting(self) -> int:
        """Turns that wait now."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    @asynccontextmanager
    async def turn(self, tenant: str, model: str) -> AsyncIterator[None]:
        """Count a turn while the block runs, which begins when there is room.

        Raises:
            LimitError: RATE_LIMITED or QUEUE_FULL; ask again later.
            UnavailableError: QUEUE_TIMEOUT, no turn ended in time.
        """
        await self._check_rates(tenant)
        if not self._limits.running:
            with self._counted():
                yield
            return
        lane = self._lanes.setdefault((tenant, model), _Lane())
        try:
            await self._enter(lane)
            try:
                with self._counted():
                    yield
            finally:
                self._leave(lane)
        finally:
            if not lane.running and not lane.waiting:
                self._lanes.pop((tenant, model), None)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _check_rates(self, tenant: str) -> None:
        if self._rates is None:
            return
        for item in self._limits.rates:
            if not await self._rates.hit(item, tenant):
                raise LimitError(
                    f"the limit is {item}",
                    reason="RATE_LIMITED",
                    **{RETRY_AFTER: max(1, item.get_expiry() // item.amount)},
                )

    async def _enter(self, lane: _Lane) -> None:
        limits = self._limits
        if lane.running < limits.running and not lane.waiting:
            lane.running += 1
            return
        if len(lane.waiting) >= limits.waiting:
            raise LimitError(
                f"{lane.running} turns run and {len(lane.waiting)} wait already",
                reason="QUEUE_FULL",
                **{RETRY_AFTER: 1},
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lane.waiting.append(turn)
        try:
            async with asyncio.timeout(limits.wait_seconds):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():
                self._leave(lane)  # it was called at the same moment
            else:
                with suppress(ValueError):  # passed over by a turn that ended just now
                    lane.waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise UnavailableError(
                    f"waited {limits.wait_seconds:g} s for another turn to end",
                    reason="QUEUE_TIMEOUT",
                    **{RETRY_AFTER: 1},
                ) from None
            raise

    def _leave(self, lane: _Lane) -> None:
        """Hand the place on to who has waited longest, or give it up."""
        while lane.waiting:
            turn = lane.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        lane.running -= 1
