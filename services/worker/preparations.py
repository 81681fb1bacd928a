"""Legs whose bodies are here, and with the engine, before the legs can begin."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Generic, Protocol, TypeVar

from kvloop.errors import KvloopError, LimitError, PreconditionError, UnavailableError
from services.worker.admission import Admission
from services.worker.engine import Api, BegunRequest, Engine
from services.worker.metrics import WorkerMetrics
from services.worker.prepared_request import PreparationOutcome
from services.worker.tasks import BackgroundTasks

ARRIVAL_SECONDS = 0.25
"""How long a leg waits for a body that it has overtaken: gRPC sends a long message in pieces,
between which short ones go."""
_REMEMBERED = 1024
"""Turns of the last moments."""


class Order(Protocol):
    """What is known of a leg ahead."""

    @property
    def turn_id(self) -> str:
        """Id of the turn."""

    @property
    def api(self) -> Api:
        """Endpoint of the engine."""

    @property
    def head(self) -> bytes:
        """The body, but for the transfer params."""


_Order = TypeVar("_Order", bound=Order)


class _Preparation(Generic[_Order]):
    """A leg that waits for the rest of its order."""

    def __init__(self, order: _Order, begun: BegunRequest) -> None:
        self.order = order
        self.begun = begun
        self.claimed = False
        self.refusal: KvloopError | None = None
        self.settled = asyncio.Event()
        """Set once it is claimed or refused."""


class Preparations(Generic[_Order]):
    """Keeps prepared legs until they are claimed.

    Until then a leg belongs to whoever brought it, and is given up when that call ends.
    From then on it belongs to whoever claimed it. A turn's leg and its body come in
    either order, each once.

    Args:
        engine: gets the bodies.
        admission: says whether there will be legs at all.
        metrics: counts what becomes of preparations.
        tasks: runs the requests to the engine, which change hands.
        limit: how many may wait; each has a connection to the engine.
    """

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        metrics: WorkerMetrics,
        tasks: BackgroundTasks,
        *,
        limit: int,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._tasks = tasks
        self._limit = limit
        self._waiting: dict[str, _Preparation[_Order]] = {}
        self._awaited: dict[str, asyncio.Event] = {}
        """Legs that wait for their bodies. Set once that has an end."""
        self._begun: deque[str] = deque(maxlen=_REMEMBERED)
        """Turns whose legs have come: no body will be claimed any more."""
        self._missed: deque[str] = deque(maxlen=_REMEMBERED)
        """Turns whose bodies came, and were refused or given up."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def hold(
        self, turn_id: str, read: Callable[[], _Order], headers: Mapping[str, str]
    ) -> None:
        """Begin a leg's request to the engine, and keep it until the leg is claimed.

        Args:
            turn_id: of the leg.
            read: reads what is known of it. Not called if it is refused.
            headers: what the request carries besides, such as a trace's context.

        Raises:
            UnavailableError: DRAINING, or the worker began to drain meanwhile.
            PreconditionError: TURN_RUNNING, the turn is prepared or has begun already, or
                runs now with a body that came in another way.
            LimitError: TOO_MANY_PREPARED.
            KvloopError: as `read`.
        """
        try:
            self._require_place(turn_id)
            order = read()
        except KvloopError:
            self._miss(turn_id)
            raise
        begun = self._engine.begin(order.api, order.head, headers)
        preparation = self._waiting[turn_id] = _Preparation(order, begun)
        self._wake(turn_id)
        try:
            running = self._tasks.start(begun.run(), name=f"prepare-{turn_id}")
            # One that is cancelled before its first step cannot clean up by itself.
            running.add_done_callback(lambda task: begun.close() if task.cancelled() else None)
            await preparation.settled.wait()
        finally:
            if not preparation.claimed:
                self._give_up(preparation)
        if preparation.refusal is not None:
            raise preparation.refusal

    @asynccontextmanager
    async def claim(self, turn_id: str) -> AsyncIterator[tuple[_Order, BegunRequest]]:
        """Take over a prepared leg that can begin, and its request, while the block runs.

        A body that is still on its way is waited for, `ARRIVAL_SECONDS` at most.

        Raises:
            PreconditionError: NOT_PREPARED, there is none; nothing was done.
        """
        try:
            await self._arrival(turn_id)
        except asyncio.CancelledError:
            self.discard(turn_id)
            raise
        self._begun.append(turn_id)
        preparation = self._waiting.pop(turn_id, None)
        if preparation is None:
            raise PreconditionError(f"turn {turn_id} is not prepared here", reason="NOT_PREPARED")
        preparation.claimed = True
        preparation.settled.set()
        try:
            yield preparation.order, preparation.begun
        finally:
            preparation.begun.close()

    def discard(self, turn_id: str) -> None:
        """Do without the body that waits here, or is to come: the leg has it from
        elsewhere, or has ended."""
        self._begun.append(turn_id)
        self._wake(turn_id)
        if preparation := self._waiting.get(turn_id):
            self._refuse(preparation, _running(turn_id))

    def drain(self) -> None:
        """Give all up: those who would claim them are turned away."""
        for preparation in list(self._waiting.values()):
            self._refuse(preparation, UnavailableError("the worker is draining", reason="DRAINING"))

    def _require_place(self, turn_id: str) -> None:
        """Refuse a body, unless its leg waits for it, and so has been let in."""
        if turn_id in self._awaited and turn_id not in self._waiting:
            return
        self._admission.require_open()
        if turn_id in self._waiting or turn_id in self._begun:
            raise _running(turn_id)
        if len(self._waiting) >= self._limit:
            raise LimitError(f"{self._limit} legs are prepared already", reason="TOO_MANY_PREPARED")

    async def _arrival(self, turn_id: str) -> None:
        """Wait for a leg's body, unless it is here or surely will not come."""
        known = (self._waiting, self._missed, self._begun, self._awaited)
        if not self._limit or any(turn_id in turns for turns in known):
            return
        arrived = self._awaited[turn_id] = asyncio.Event()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(ARRIVAL_SECONDS):
                    await arrived.wait()
        finally:
            del self._awaited[turn_id]

    def _miss(self, turn_id: str) -> None:
        self._missed.append(turn_id)
        self._wake(turn_id)

    def _wake(self, turn_id: str) -> None:
        if arrived := self._awaited.get(turn_id):
            arrived.set()

    def _refuse(self, preparation: _Preparation[_Order], refusal: KvloopError) -> None:
        preparation.refusal = refusal
        preparation.settled.set()
        self._give_up(preparation)

    def _give_up(self, preparation: _Preparation[_Order]) -> None:
        """Close its request, unless that has been done."""
        turn_id = preparation.order.turn_id
        if self._waiting.get(turn_id) is preparation:
            del self._waiting[turn_id]
            preparation.begun.close()
            self._miss(turn_id)
            self._metrics.preparations.labels(outcome=PreparationOutcome.GIVEN_UP).inc()


def _running(turn_id: str) -> PreconditionError:
    return PreconditionError(f"the body of turn {turn_id} is here already", reason="TURN_RUNNING")
