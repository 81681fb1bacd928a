"""The decode leg: streams the answer, and is repeated only before its first chunk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import structlog

from kvloop.compatibility import hand_over_obstacle
from kvloop.errors import InternalError, KvloopError, PreconditionError, UnavailableError
from kvloop.kvmeta.v1 import registry_pb2
from kvloop.worker.v1 import worker_pb2
from services.common.tracing import child_span, current
from services.router.attempts import tell_of_failure
from services.router.failures import is_rejection, params_unused, worker_is_down
from services.router.metrics import Fallback, RouterMetrics
from services.router.patience import Patience, SilenceGuard
from services.router.preparation import (
    NOT_PREPARED,
    BodiesAhead,
    Preparation,
    Prepared,
    has_body,
)
from services.router.routing import Routes
from services.router.turn_state import Turn
from services.router.worker_client import PreparedLeg, WorkerClient, connect_in_time, prompt_span
from services.router.workers import WorkerPool

_log = structlog.get_logger(__name__)
_PAUSE_SECONDS = 0.002
"""From the beginning of the prefill leg to the body for decode, which shall not be in its way."""


class DecodeLeg:
    """Runs the decode leg of turns.

    Args:
        pool: the live workers.
        routes: chooses among them.
        metrics: counts departures from the plan.
        connect_timeout_seconds: how long to wait for a connection.
        patience: how long to wait for the chunks of a streamed answer. One that
            comes in one piece may take all of the turn's time.
        ahead: lets bodies go ahead.
    """

    def __init__(
        self,
        pool: WorkerPool,
        routes: Routes,
        metrics: RouterMetrics,
        *,
        connect_timeout_seconds: float,
        patience: Patience,
        ahead: BodiesAhead,
    ) -> None:
        self._pool = pool
        self._routes = routes
        self._metrics = metrics
        self._connect_timeout_seconds = connect_timeout_seconds
        self._patience = patience
        self._ahead = ahead
        self._count = partial(metrics.prepared, "decode")

    async def run(
        self, turn: Turn, worker: registry_pb2.Worker
    ) -> AsyncGenerator[Sequence[bytes], None]:
        """The answer's chunks as the engine wrote them, by arrival.

        Fills in the summary, and the chunks that came with it.

        Raises:
            KvloopError: the leg failed, twice or after its first chunk, and before its
                summary.
        """
        worker = self._look_again(turn, worker)
        with child_span("decode_leg"):
            try:
                async with aclosing(self._attempt(turn, worker)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except KvloopError as error:
                if turn.summary is not None:  # the answer is whole, and the turn settled
                    tell_of_failure("decode_ended_badly", turn.turn_id, worker.worker_id, error)
                    return
                other = self._after_failure(turn, worker, error)
            self._metrics.fell_back(Fallback.DECODE_REPEATED)
            async with aclosing(self._attempt(turn, other)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def prepare(self, turn: Turn, worker: registry_pb2.Worker) -> Preparation | None:
        """Let a long body go ahead to the worker, which reads it while prefill works."""
        if not self._ahead.takes(len(turn.request.body_json)):
            return None

        def send(client: WorkerClient, timeout_seconds: float) -> PreparedLeg | None:
            return client.prepare_decode(_whole_leg(turn), timeout_seconds=timeout_seconds)

        return self._ahead.begin(worker, send, turn.deadline, pause_seconds=_PAUSE_SECONDS)

    async def _attempt(
        self, turn: Turn, worker: registry_pb2.Worker
    ) -> AsyncGenerator[Sequence[bytes], None]:
        turn.decode_worker = worker
        turn.decode_started = turn.deadline.clock()
        # What comes first of an answer in one piece is the end of it, which tells
        # nothing of waiting and of reading the hand-over.
        facts = None if turn.request.whole else turn.facts
        with self._pool.use(worker.worker_id, facts) as client:
            await connect_in_time(client, turn.deadline, self._connect_timeout_seconds)
            prepared = has_body(client, turn.decode_ahead, self._count)
            while turn.summary is None:
                leg = _rest_of_leg(turn) if prepared else _whole_leg(turn)
                answer = client.decode(leg, timeout_seconds=turn.deadline.hop_timeout())
                try:
                    async with self._guard(turn, worker) as guard, aclosing(answer) as events:
                        async for event in events:
                            guard.heard()
                            if chunks := self._heard(turn, worker, event):
                                yield chunks
                            guard.listens()
                except PreconditionError as error:
                    if not (prepared and error.reason == NOT_PREPARED):
                        raise
                    self._count(Prepared.LOST)
                    turn.decode_has_body()
                    prepared = False
                    continue
                if turn.summary is None:
                    raise InternalError(
                        f"decode worker {worker.worker_id} ended its answer without a summary",
                        reason="ANSWER_INCOMPLETE",
                        worker_id=worker.worker_id,
                    )

    def _heard(
        self, turn: Turn, worker: registry_pb2.Worker, event: worker_pb2.DecodeResponse
    ) -> Sequence[bytes]:
        """Take in what the worker says; the chunks that go on."""
        if event.HasField("summary"):
            turn.summary = event.summary
            return ()
        if turn.first_chunk_at is None:
            turn.first_chunk_at = turn.deadline.clock()
            turn.decode_has_body()
            if not turn.request.whole:
                self._pool.first_chunk(worker.worker_id, turn.facts)
            current().event("first_chunk")
        if not event.HasField("batch"):
            return (event.chunk_json,)
        if event.batch.HasField("summary"):
            turn.summary = event.batch.summary
            turn.last_chunks = event.batch.chunks_json
            return ()
        return event.batch.chunks_json

    def _guard(self, turn: Turn, worker: registry_pb2.Worker) -> SilenceGuard:
        first = self._patience.with_first_chunk(len(turn.request.body_json))
        return SilenceGuard(
            worker.worker_id,
            first_seconds=None if turn.request.whole else first,
            next_seconds=self._patience.next_chunk_seconds,
        )

    def _look_again(self, turn: Turn, worker: registry_pb2.Worker) -> registry_pb2.Worker:
        """The worker for the first attempt: the one chosen, if it is still well.

        It was chosen before prefill. Since then it may have failed others, or one of
        the turns that had chosen it may be trying it out.
        """
        if self._is_well(worker):
            return worker
        other = self._another(turn, worker)
        if other is None or not self._is_well(other):
            return worker
        turn.move = self._routes.move(turn.request.model, turn.facts, other.worker_id)
        _log.info(
            "decode_moved",
            turn_id=turn.turn_id,
            worker_id=other.worker_id,
            instead_of=worker.worker_id,
        )
        self._keep_params_if(turn, self._can_read(turn, other))
        return other

    def _is_well(self, worker: registry_pb2.Worker) -> bool:
        found = self._pool.find(worker.worker_id)
        return found is not None and found.takes_turns and found.reachable

    def _after_failure(
        self, turn: Turn, worker: registry_pb2.Worker, error: KvloopError
    ) -> registry_pb2.Worker:
        """The worker for a second attempt; raises the error if there can be none."""
        mid_answer = turn.first_chunk_at is not None
        tell_of_failure(
            "decode_failed", turn.turn_id, worker.worker_id, error, mid_answer=mid_answer
        )
        if mid_answer or is_rejection(error):
            raise error
        turn.deadline.check()
        other = self._another(turn, worker)
        if other is None or not self._is_well(other):
            # This one's engine may have failed at the transfer, which is left out now.
            if turn.transfer_params and not worker_is_down(error):
                other = worker
            elif other is None:
                raise error
        turn.move = self._routes.move(
            turn.request.model, turn.facts, other.worker_id, failed_id=worker.worker_id
        )
        # Only if nobody can have read it.
        self._keep_params_if(turn, params_unused(error) and self._can_read(turn, other))
        return other

    def _another(self, turn: Turn, failed: registry_pb2.Worker) -> registry_pb2.Worker | None:
        try:
            return self._routes.decode(turn.request.model, turn.facts, but=failed.worker_id)
        except UnavailableError:
            return None

    def _can_read(self, turn: Turn, other: registry_pb2.Worker) -> bool:
        source = turn.prefill_worker
        return source is not None and hand_over_obstacle(source, other) is None

    def _keep_params_if(self, turn: Turn, usable: bool) -> None:
        if turn.transfer_params and not usable:
            turn.transfer_params = b""
            self._metrics.fell_back(Fallback.HANDOVER_DROPPED)


def _whole_leg(turn: Turn) -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(
        turn_id=turn.turn_id,
        api=turn.request.api,
        body_json=turn.request.body_json,
        transfer_params_json=turn.transfer_params,
        commit=turn.commit,
        whole=turn.request.whole,
        accept_batches=True,
        prompt=prompt_span(turn.request),
    )


def _rest_of_leg(turn: Turn) -> worker_pb2.DecodeRequest:
    """What is left to say when the body has gone ahead."""
    return worker_pb2.DecodeRequest(
        turn_id=turn.turn_id,
        transfer_params_json=turn.transfer_params,
        accept_batches=True,
        prepared=True,
    )
