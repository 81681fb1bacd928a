"""Takes conversations' handles from the ledger and sees that none gets lost.

A handle may be shown to one prefill engine, once. `HeldHandle` makes that a
property of the object, and whatever was not shown goes back to the ledger, even
if the caller hangs up or the ledger answers too late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from kvloop.common.v1 import common_pb2
from kvloop.errors import ConflictError, DeadlineError, InternalError, KvloopError
from kvloop.kvmeta.v1 import ledger_pb2
from services.common.span_attributes import HANDLE_HIT
from services.common.tracing import child_span
from services.router.ledger import Ledger, Opening
from services.router.metrics import HandleReturn, RouterMetrics

_log = structlog.get_logger(__name__)


class HeldHandle:
    """A handle that this turn alone holds and has not shown to any engine yet."""

    def __init__(self, handle: ledger_pb2.Handle) -> None:
        self.handle = handle
        self._in_hand = True

    @property
    def in_hand(self) -> bool:
        """True while no prefill engine can have seen it."""
        return self._in_hand

    def show(self) -> bytes:
        """The params for one prefill call. From here on the handle counts as used.

        Raises:
            InternalError: it was shown before; a second pull could read another
                conversation's blocks.
        """
        if not self._in_hand:
            raise InternalError("a handle was about to be used twice", reason="HANDLE_REUSED")
        self._in_hand = False
        return self.handle.transfer_params_json

    def unshow(self) -> None:
        """Take `show` back: it is certain that the engine never saw the handle."""
        self._in_hand = True


@dataclass
class OpenTurn:
    """A turn as the ledger knows it."""

    number: int
    """Number of the turn; 0 if the ledger could not be asked."""
    held: HeldHandle | None
    """The conversation's handle, if this turn got it."""
    miss_reason: common_pb2.MissReason.ValueType
    """Why there is none."""
    last_worker_id: str
    """Decode worker that last served the conversation, or empty."""


class HandleDesk:
    """Opens turns at the ledger without ever making one wait for long.

    Args:
        ledger: gives handles out and takes them back.
        metrics: counts what happens.
        tasks: owns the calls to the ledger, which outlive a caller that hangs up.
        patience_seconds: how long a turn waits for the ledger before it goes on
            without a handle.
        call_timeout_seconds: how long a call to the ledger may take. An answer
            that comes after the turn's patience is given back.
    """

    def __init__(
        self,
        ledger: Ledger,
        metrics: RouterMetrics,
        tasks: asyncio.TaskGroup,
        *,
        patience_seconds: float,
        call_timeout_seconds: float,
    ) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._tasks = tasks
        self._patience_seconds = patience_seconds
        self._call_timeout_seconds = call_timeout_seconds

    @asynccontextmanager
    async def open_turn(
        self,
        key: common_pb2.ConversationKey,
        turn_id: str,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[OpenTurn]:
        """Open a turn; what is still in hand at the end of the block goes back.

        A ledger that fails or is slow gives a turn without number and handle.

        Args:
            key: the conversation.
            turn_id: id of the turn.
            meanwhile: called as soon as the ledger has been asked.
        """
        with child_span("take_handle") as span:
            opened = await self._open(key, turn_id, meanwhile)
            span.tell({HANDLE_HIT: opened.held is not None})
            if opened.miss_reason == common_pb2.MISS_REASON_LEDGER_UNAVAILABLE:
                span.fail("LEDGER_UNAVAILABLE")
        try:
            yield opened
        finally:
            if opened.held is not None and opened.held.in_hand:
                await self._return(key, turn_id, opened.held.handle, HandleReturn.UNUSED)

    async def give_back(
        self, key: common_pb2.ConversationKey, turn_id: str, opened: OpenTurn
    ) -> None:
        """Give an unused handle back now; the turn goes on without it."""
        held, opened.held = opened.held, None
        if held is not None and held.in_hand:
            await self._return(key, turn_id, held.handle, HandleReturn.UNUSED)

    async def _open(
        self, key: common_pb2.ConversationKey, turn_id: str, meanwhile: Callable[[], None]
    ) -> OpenTurn:
        abandoned = asyncio.Event()
        task = self._tasks.create_task(
            self._take(key, turn_id, abandoned), name=f"take handle for {turn_id}"
        )
        answer: Opening | KvloopError = DeadlineError("the ledger did not answer in time")
        try:
            await asyncio.sleep(0)  # the call goes out first
            meanwhile()
            await asyncio.wait({task}, timeout=self._patience_seconds)
        except BaseException:
            abandoned.set()
            if task.done():
                self._give_back_late(key, turn_id, task.result())
            raise
        if task.done():
            answer = task.result()
        else:
            abandoned.set()
        if isinstance(answer, KvloopError):
            _log.warning("ledger_unavailable", turn_id=turn_id, reason=answer.reason)
            return OpenTurn(0, None, common_pb2.MISS_REASON_LEDGER_UNAVAILABLE, "")
        held = HeldHandle(answer.handle) if answer.handle is not None else None
        return OpenTurn(answer.turn, held, answer.miss_reason, answer.last_worker_id)

    async def _take(
        self, key: common_pb2.ConversationKey, turn_id: str, abandoned: asyncio.Event
    ) -> Opening | KvloopError:
        """The ledger's answer, or its error as a value: it must not end other turns."""
        try:
            answer = await self._ledger.take_handle(
                key, turn_id, timeout_seconds=self._call_timeout_seconds
            )
        except KvloopError as error:
            return error
        if abandoned.is_set():
            self._give_back_late(key, turn_id, answer)
        return answer

    def _give_back_late(
        self, key: common_pb2.ConversationKey, turn_id: str, answer: Opening | KvloopError
    ) -> None:
        if isinstance(answer, Opening) and answer.handle is not None:
            self._tasks.create_task(
                self._call_return(key, turn_id, answer.handle, HandleReturn.LATE),
                name=f"return handle of {turn_id}",
            )

    async def _return(
        self,
        key: common_pb2.ConversationKey,
        turn_id: str,
        handle: ledger_pb2.Handle,
        outcome: HandleReturn,
    ) -> None:
        """Return a handle, to the end even if the caller hangs up meanwhile.

        The turn waits no longer than its patience: on a ledger that hangs, the call
        goes on by itself. It compares before it sets, so coming late does no harm.
        """
        task = self._tasks.create_task(
            self._call_return(key, turn_id, handle, outcome), name=f"return handle of {turn_id}"
        )
        await asyncio.wait({task}, timeout=self._patience_seconds)

    async def _call_return(
        self,
        key: common_pb2.ConversationKey,
        turn_id: str,
        handle: ledger_pb2.Handle,
        outcome: HandleReturn,
    ) -> None:
        try:
            await self._ledger.return_handle(
                key, handle.handle_id, turn_id, timeout_seconds=self._call_timeout_seconds
            )
        except ConflictError:
            outcome = HandleReturn.NOT_HELD
        except KvloopError as error:
            outcome = HandleReturn.FAILED
            _log.warning("handle_not_returned", turn_id=turn_id, reason=error.reason)
        self._metrics.handle_returned(outcome)
