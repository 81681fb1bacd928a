"""The pipeline of one turn: admit, open, prefill, decode, receipt."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass

from kvloop.common.v1 import common_pb2
from kvloop.errors import KvloopError, ModelNotFoundError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.router.v1 import router_pb2
from kvloop.worker.v1 import worker_pb2
from services.router import receipt
from services.router.cached_tokens import with_cached_tokens
from services.router.deadline import Clock, Deadline
from services.router.decode_leg import DecodeLeg
from services.router.failures import name_prompt
from services.router.handles import HandleDesk, OpenTurn
from services.router.history import History
from services.router.identity import conversation_key
from services.router.length import LengthCheck
from services.router.prefill_leg import PrefillLeg
from services.router.request import TurnRequest
from services.router.routing import Routes
from services.router.turn_ends import TurnEnds
from services.router.turn_state import Turn
from services.router.workers import ModelWorkers, WorkerPool


def admit(model: str, known: list[ModelWorkers]) -> ModelWorkers:
    """The workers of a model, if turns for it can be answered now.

    Raises:
        ModelNotFoundError: no worker serves the model.
        UnavailableError: there are no workers at all, or none that decodes.
    """
    if not known:
        raise UnavailableError(
            "no workers are registered yet; start some, or check that the router reaches kvmeta",
            reason="NO_WORKERS",
        )
    found = next((entry for entry in known if entry.name == model), None)
    if found is None:
        names = ", ".join(repr(entry.name) for entry in known)
        raise ModelNotFoundError(
            f"no worker serves the model {model!r}; there is {names}", field="model"
        )
    if not found.decode:
        raise UnavailableError(
            f"no decode worker takes turns for {model!r} now", reason="NO_DECODE_WORKER"
        )
    return found


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """What ends an answer."""

    chunks: Sequence[bytes]
    """The last ones, as the engine wrote them; none if all went on before."""
    result: router_pb2.TurnResult
    """What kvloop did."""


class TurnPipeline:
    """Answers turns.

    Args:
        pool: the live workers.
        routes: chooses among them.
        handles: opens turns at the ledger.
        length: refuses prompts that are too long.
        prefill: runs the prefill leg.
        decode: runs the decode leg.
        ends: notes how turns end.
        clock: seconds on a clock that never goes back.
        new_id: makes turn ids.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        routes: Routes,
        handles: HandleDesk,
        length: LengthCheck,
        prefill: PrefillLeg,
        decode: DecodeLeg,
        ends: TurnEnds,
        clock: Clock,
        new_id: Callable[[], uuid.UUID] = uuid.uuid4,
    ) -> None:
        self._pool = pool
        self._routes = routes
        self._handles = handles
        self._length = length
        self._prefill = prefill
        self._decode = decode
        self._ends = ends
        self._clock = clock
        self._new_id = new_id

    async def run(
        self, request: TurnRequest, deadline: Deadline, turn_id: str | None = None
    ) -> AsyncGenerator[Sequence[bytes] | AnswerEnd, None]:
        """The answer: chunks as the engine wrote them, by arrival, then its end.

        Closing the generator stops both engines' work.

        Args:
            request: what to answer.
            deadline: when it must be over.
            turn_id: from `new_turn_id`, for callers that have to know it before.

        Raises:
            KvloopError: why the turn could not be answered.
        """
        turn = Turn(turn_id or self.new_turn_id(), request, deadline, started=self._clock())
        try:
            decode_worker = await self._before_decode(turn)
            async with aclosing(self._decode.run(turn, decode_worker)) as arrivals:
                async for chunks in arrivals:
                    yield self._told(turn, chunks)
            end = AnswerEnd(self._told(turn, turn.last_chunks), receipt.build_result(turn))
            self._ends.answered(turn)
        except KvloopError as error:
            name_prompt(error, request.prompt_path)
            self._ends.failed(turn, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._ends.cancelled(turn)
            raise
        except Exception:
            self._ends.broke(turn)
            raise
        finally:
            turn.close()
        yield end

    def new_turn_id(self) -> str:
        """An id for a turn."""
        return self._new_id().hex

    def _told(self, turn: Turn, chunks: Sequence[bytes]) -> Sequence[bytes]:
        report = turn.report
        if report is None or not turn.request.tell_cached_tokens:
            return chunks
        return [with_cached_tokens(turn.request.api, chunk, report) for chunk in chunks]

    async def _before_decode(self, turn: Turn) -> registry_pb2.Worker:
        """Everything up to the hand-over; the handle is used or returned by its end."""
        request = turn.request
        workers = admit(request.model, self._pool.models())
        await self._length.check(request, workers.context_limit, turn.deadline)
        turn.miss_reason = request.miss_reason
        if not request.retains:
            opened = OpenTurn(0, None, request.miss_reason, "")
            return await self._prefilled(turn, opened)
        if request.history is not None and not request.conversation_id:
            return await self._recognised(turn, request.history)
        turn.key = conversation_key(request.tenant, request.model, request.conversation_id)
        async with self._opened(turn, turn.key) as opened:
            turn.number = opened.number
            turn.miss_reason = opened.miss_reason
            turn.commit = worker_pb2.TurnRef(key=turn.key, turn=turn.number)
            return await self._prefilled(turn, opened)

    async def _recognised(self, turn: Turn, history: History) -> registry_pb2.Worker:
        """As for a conversation with an id, which is what the history says."""
        request = turn.request
        turn.number = history.answers + 1
        turn.commit = worker_pb2.TurnRef(
            key=conversation_key(request.tenant, request.model), history_digest=history.digest
        )
        if not history.conversation_id:  # nothing was said that could be retained
            turn.miss_reason = common_pb2.MISS_REASON_FIRST_TURN
            return await self._prefilled(turn, OpenTurn(0, None, turn.miss_reason, ""))
        turn.key = conversation_key(request.tenant, request.model, history.conversation_id)
        async with self._opened(turn, turn.key) as opened:
            turn.miss_reason = opened.miss_reason
            if opened.miss_reason == common_pb2.MISS_REASON_FIRST_TURN:
                turn.miss_reason = common_pb2.MISS_REASON_HISTORY_UNKNOWN
            return await self._prefilled(turn, opened)

    def _opened(
        self, turn: Turn, key: common_pb2.ConversationKey
    ) -> AbstractAsyncContextManager[OpenTurn]:
        def meanwhile() -> None:
            if turn.request.options.single_leg_feature is None:
                turn.prefill_ahead = self._prefill.prepare(turn)

        return self._handles.open_turn(key, turn.turn_id, meanwhile)

    async def _prefilled(self, turn: Turn, opened: OpenTurn) -> registry_pb2.Worker:
        held = opened.held.handle if opened.held is not None else ledger_pb2.Handle()
        turn.facts = self._routes.facts(
            turn.request,
            holder_id=held.worker_id,
            held_tokens=held.num_tokens,
            last_id=opened.last_worker_id,
        )
        worker = self._routes.decode(turn.request.model, turn.facts)
        turn.decode_worker = worker
        turn.move = self._routes.move(turn.request.model, turn.facts, worker.worker_id)
        if turn.request.options.single_leg_feature is None:
            turn.decode_ahead = self._decode.prepare(turn, worker)
            await self._prefill.run(turn, opened)
        return worker
