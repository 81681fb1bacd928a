"""The prefill leg: which worker, with or without the handle, and what if it fails.

A failure never ends the turn, unless the request itself is at fault or its time
is up: the decode worker can compute the prompt alone.
"""

from __future__ import annotations

from functools import partial

import structlog

from kvloop.common.v1 import common_pb2
from kvloop.compatibility import pull_obstacle
from kvloop.errors import DeadlineError, KvloopError, PreconditionError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.worker.v1 import worker_pb2
from services.common.span_attributes import miss_attributes, report_attributes
from services.common.tracing import child_span, current
from services.router.attempts import tell_of_failure
from services.router.failures import (
    is_rejection,
    params_unused,
    worker_is_down,
)
from services.router.handle_source import foreign_source
from services.router.handles import HandleDesk, HeldHandle, OpenTurn
from services.router.metrics import Fallback, RouterMetrics
from services.router.patience import Patience, silent
from services.router.preparation import (
    NOT_PREPARED,
    BodiesAhead,
    Preparation,
    Prepared,
    has_body,
)
from services.router.receipt import miss_reason
from services.router.routing import Routes
from services.router.token_handover import takes_token_ids
from services.router.turn_state import Turn
from services.router.worker_client import (
    PreparedLeg,
    WorkerClient,
    connect_in_time,
    prompt_span,
)
from services.router.workers import WorkerPool

_log = structlog.get_logger(__name__)
_ATTEMPTS = 2


def usable_holder(
    handle: ledger_pb2.Handle, pool: WorkerPool
) -> registry_pb2.Worker | tuple[common_pb2.MissReason.ValueType, Fallback]:
    """The worker that holds the handle's KV, or why nothing can be pulled from it.

    A worker that only drains still holds its blocks. One that was unreachable a
    moment ago is not asked: a pull from a dead engine costs the turn a timeout.
    """
    found = pool.find(handle.worker_id)
    if found is None or not found.reachable:
        return common_pb2.MISS_REASON_INCOMPATIBLE, Fallback.HOLDER_UNREACHABLE
    if found.worker.engine != handle.engine:
        return common_pb2.MISS_REASON_VOID, Fallback.HOLDER_RESTARTED
    return found.worker


class PrefillLeg:
    """Runs the prefill leg of turns.

    Args:
        pool: the live workers.
        routes: chooses among them.
        handles: takes unused handles back.
        metrics: counts departures from the plan.
        connect_timeout_seconds: how long to wait for a connection.
        patience: how long one attempt may take.
        ahead: lets bodies go ahead.
    """

    def __init__(
        self,
        pool: WorkerPool,
        routes: Routes,
        handles: HandleDesk,
        metrics: RouterMetrics,
        *,
        connect_timeout_seconds: float,
        patience: Patience,
        ahead: BodiesAhead,
    ) -> None:
        self._pool = pool
        self._routes = routes
        self._handles = handles
        self._metrics = metrics
        self._connect_timeout_seconds = connect_timeout_seconds
        self._patience = patience
        self._ahead = ahead
        self._count = partial(metrics.prepared, "prefill")

    def prepare(self, turn: Turn) -> Preparation | None:
        """Let a long body go ahead to the worker that is the right one as far as is known.

        The handle may call for another, which then gets the body itself.
        """
        request = turn.request
        if not self._ahead.takes(len(request.body_json)):
            return None
        facts = self._routes.facts(request)
        try:
            decode = self._routes.decode(request.model, facts)
        except UnavailableError:
            return None
        worker = self._routes.prefill(request.model, facts, decode=decode, holder=None)

        def send(client: WorkerClient, timeout_seconds: float) -> PreparedLeg | None:
            leg = worker_pb2.PrefillRequest(turn_id=turn.turn_id)
            _add_body(leg, turn)
            return client.prepare_prefill(leg, timeout_seconds=timeout_seconds)

        return self._ahead.begin(worker, send, turn.deadline) if worker is not None else None

    async def run(self, turn: Turn, opened: OpenTurn) -> None:
        """Fill in what the leg handed over, or leave it out.

        Raises:
            InvalidFieldError: the engine refuses the request.
            DeadlineError: the turn's deadline passed.
        """
        started = turn.deadline.clock()
        with child_span("prefill_leg") as span:
            try:
                await self._check_holder(turn, opened)
                await self._attempts(turn, opened)
            finally:
                turn.prefill_seconds = turn.deadline.clock() - started
                turn.prefill_has_body()  # or does not need it: the leg may have been left out
            if turn.report is not None and span.recording:
                span.tell(report_attributes(turn.report))
                span.tell(miss_attributes(miss_reason(turn)))
        if turn.report is not None:
            self._metrics.prefilled(turn.report, turn.prefill_seconds)

    async def _attempts(self, turn: Turn, opened: OpenTurn) -> None:
        tried: set[str] = set()
        spare: registry_pb2.Worker | None = None
        for attempt in range(_ATTEMPTS):
            worker = self._choose(turn, opened, tried) or spare
            if worker is None:
                break
            if attempt:
                self._metrics.fell_back(Fallback.PREFILL_REPEATED)
            tried.add(worker.worker_id)
            held = await self._pair(turn, opened, worker)
            try:
                return await self._attempt(turn, worker, held)
            except KvloopError as error:
                self._note(turn, worker, held, error)
                # A worker that was reached may be asked again if it is the only one.
                spare = None if worker_is_down(error) else worker
        await self._leave_out(turn, opened)

    async def _check_holder(self, turn: Turn, opened: OpenTurn) -> None:
        """Part with the handle at once if its KV cannot be pulled by anyone."""
        if opened.held is None:
            return
        found = usable_holder(opened.held.handle, self._pool)
        if not isinstance(found, registry_pb2.Worker):
            turn.miss_reason, cause = found
            self._metrics.fell_back(cause)
            await self._give_back(turn, opened)
            return
        part = foreign_source(opened.held.handle.transfer_params_json, found)
        if part is not None:
            # Kept from all turns: it does not go back to the ledger.
            opened.held = None
            turn.miss_reason = common_pb2.MISS_REASON_INCOMPATIBLE
            self._metrics.fell_back(Fallback.HANDLE_LEADS_ELSEWHERE)
            _log.error(
                "handle_leads_elsewhere",
                turn_id=turn.turn_id,
                worker_id=found.worker_id,
                part=part,
            )

    def _choose(self, turn: Turn, opened: OpenTurn, tried: set[str]) -> registry_pb2.Worker | None:
        return self._routes.prefill(
            turn.request.model,
            turn.facts,
            decode=turn.decode_worker,
            holder=self._holder(opened),
            but=tried,
            prefer=turn.prefill_ahead.worker_id if turn.prefill_ahead is not None else "",
        )

    async def _pair(
        self, turn: Turn, opened: OpenTurn, worker: registry_pb2.Worker
    ) -> HeldHandle | None:
        """The handle, if it is still in hand and the worker can pull with it."""
        held, holder = opened.held, self._holder(opened)
        if held is None or not held.in_hand:
            return None
        if holder is not None and pull_obstacle(worker, holder) is None:
            return held
        turn.miss_reason = common_pb2.MISS_REASON_INCOMPATIBLE
        self._metrics.fell_back(Fallback.NO_COMPATIBLE_PREFILL)
        await self._give_back(turn, opened)
        return None

    async def _attempt(
        self, turn: Turn, worker: registry_pb2.Worker, held: HeldHandle | None
    ) -> None:
        facts = turn.facts if held is not None else turn.facts.without_handle()
        with self._pool.use(worker.worker_id, facts) as client:
            await connect_in_time(client, turn.deadline, self._connect_timeout_seconds)
            patience = self._patience.with_prefill(len(turn.request.body_json))
            timeout = turn.deadline.hop_timeout(patience)
            leg = worker_pb2.PrefillRequest(
                turn_id=turn.turn_id,
                hand_token_ids_over=takes_token_ids(turn.request, turn.decode_worker),
                prepared=has_body(client, turn.prefill_ahead, self._count),
            )
            if held is not None:
                leg.transfer_params_json = held.show()
                leg.engine.CopyFrom(held.handle.engine)
                if held.handle.HasField("deadline_extension"):
                    leg.deadline_extension.CopyFrom(held.handle.deadline_extension)
                turn.handle_hit = True
            try:
                response = await self._prefill(turn, client, leg, timeout)
            except KvloopError as error:
                if held is not None and params_unused(error):
                    held.unshow()
                    turn.handle_hit = False
                if isinstance(error, DeadlineError) and not turn.deadline.passed:
                    raise silent(worker.worker_id, timeout) from error
                raise
            self._routes.prefilled(turn.request, worker.worker_id, facts, response.report)
        turn.prefill_worker = worker
        turn.transfer_params = response.transfer_params_json
        turn.report = response.report
        if not response.transfer_params_json:
            self._metrics.fell_back(Fallback.NO_HANDOVER)
            _log.warning("no_handover", turn_id=turn.turn_id, worker_id=worker.worker_id)

    async def _prefill(
        self, turn: Turn, client: WorkerClient, leg: worker_pb2.PrefillRequest, seconds: float
    ) -> worker_pb2.PrefillResponse:
        if leg.prepared:
            try:
                return await client.prefill(leg, timeout_seconds=seconds)
            except PreconditionError as error:
                if error.reason != NOT_PREPARED:
                    raise
            self._count(Prepared.LOST)
            turn.prefill_has_body()
            leg.prepared = False
        _add_body(leg, turn)
        return await client.prefill(leg, timeout_seconds=seconds)

    def _note(
        self,
        turn: Turn,
        worker: registry_pb2.Worker,
        held: HeldHandle | None,
        error: KvloopError,
    ) -> None:
        """Learn from a failed attempt; raise if another would not help."""
        if is_rejection(error):
            raise error
        turn.deadline.check()
        if held is not None and not held.in_hand:
            turn.miss_reason = common_pb2.MISS_REASON_PREFILL_FAILED
        tell_of_failure(
            "prefill_failed", turn.turn_id, worker.worker_id, error, with_handle=held is not None
        )

    async def _leave_out(self, turn: Turn, opened: OpenTurn) -> None:
        self._metrics.fell_back(Fallback.PREFILL_LEFT_OUT)
        current().fail("PREFILL_LEFT_OUT")
        _log.warning("prefill_left_out", turn_id=turn.turn_id, model=turn.request.model)
        if opened.held is not None and opened.held.in_hand:
            turn.miss_reason = common_pb2.MISS_REASON_INCOMPATIBLE
            await self._give_back(turn, opened)

    async def _give_back(self, turn: Turn, opened: OpenTurn) -> None:
        if turn.key is not None:
            await self._handles.give_back(turn.key, turn.turn_id, opened)

    def _holder(self, opened: OpenTurn) -> registry_pb2.Worker | None:
        if opened.held is None or not opened.held.in_hand:
            return None
        found = usable_holder(opened.held.handle, self._pool)
        return found if isinstance(found, registry_pb2.Worker) else None


def _add_body(leg: worker_pb2.PrefillRequest, turn: Turn) -> None:
    leg.api = turn.request.api
    leg.body_json = turn.request.body_json
    if (prompt := prompt_span(turn.request)) is not None:
        leg.prompt.CopyFrom(prompt)
