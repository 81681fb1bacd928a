"""The decode leg: streams the answer, and is repeated only before its first chunk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import structlog

from kvloop.common.v1 import common_pb2
from kvloop.compatibility import hand_over_obstacle
from kvloop.errors import InternalError, KvloopError
from kvloop.kvmeta.v1 import registry_pb2
from kvloop.worker.v1 import worker_pb2
from services.common.span_attributes import WORKER_ID
from services.common.tracing import ERROR_TYPE, child_span, current
from services.router.failures import is_rejection, params_unused, worker_is_down
from services.router.metrics import Fallback, RouterMetrics
from services.router.policy import Rng, first_usable, rank_decode
from services.router.turn_state import Turn
from services.router.worker_client import prompt_span
from services.router.workers import WorkerPool

_log = structlog.get_logger(__name__)


class DecodeLeg:
    """Runs the decode leg of turns.

    Args:
        pool: the live workers.
        metrics: counts departures from the plan.
        rng: breaks ties between workers.
        connect_timeout_seconds: how long to wait for a connection.
    """

    def __init__(
        self,
        pool: WorkerPool,
        metrics: RouterMetrics,
        *,
        rng: Rng,
        connect_timeout_seconds: float,
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._rng = rng
        self._connect_timeout_seconds = connect_timeout_seconds

    async def run(
        self, turn: Turn, worker: registry_pb2.Worker
    ) -> AsyncGenerator[Sequence[bytes], None]:
        """The answer's chunks as the engine wrote them, by arrival; fills in the summary.

        Raises:
            KvloopError: the leg failed, twice or after its first chunk.
        """
        with child_span("decode_leg"):
            try:
                async with aclosing(self._attempt(turn, worker)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except KvloopError as error:
                other = self._after_failure(turn, worker, error)
            self._metrics.fell_back(Fallback.DECODE_REPEATED)
            async with aclosing(self._attempt(turn, other)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _attempt(
        self, turn: Turn, worker: registry_pb2.Worker
    ) -> AsyncGenerator[Sequence[bytes], None]:
        turn.decode_worker = worker
        clock = turn.deadline.clock
        turn.decode_started = clock()
        request = worker_pb2.DecodeRequest(
            turn_id=turn.turn_id,
            api=turn.request.api,
            body_json=turn.request.body_json,
            transfer_params_json=turn.transfer_params,
            commit=turn.commit,
            whole=turn.request.whole,
            accept_batches=True,
            prompt=prompt_span(turn.request),
        )
        with self._pool.use(worker.worker_id) as client:
            await client.connect(
                timeout_seconds=turn.deadline.hop_timeout(self._connect_timeout_seconds)
            )
            answer = client.decode(request, timeout_seconds=turn.deadline.hop_timeout())
            async with aclosing(answer) as events:
                async for event in events:
                    if event.HasField("summary"):
                        turn.summary = event.summary
                        continue
                    if turn.first_chunk_at is None:
                        turn.first_chunk_at = clock()
                        current().event("first_chunk")
                    if event.HasField("batch"):
                        yield event.batch.chunks_json
                    else:
                        yield (event.chunk_json,)
        if turn.summary is None:
            raise InternalError(
                f"decode worker {worker.worker_id} ended its answer without a summary",
                reason="ANSWER_INCOMPLETE",
                worker_id=worker.worker_id,
            )

    def _after_failure(
        self, turn: Turn, worker: registry_pb2.Worker, error: KvloopError
    ) -> registry_pb2.Worker:
        """The worker for a second attempt; raises the error if there can be none."""
        if worker_is_down(error):
            self._pool.cool_down(worker.worker_id)
        current().event("attempt_failed", {ERROR_TYPE: error.reason, WORKER_ID: worker.worker_id})
        _log.warning(
            "decode_failed",
            turn_id=turn.turn_id,
            worker_id=worker.worker_id,
            reason=error.reason,
            mid_answer=turn.first_chunk_at is not None,
        )
        if turn.first_chunk_at is not None or is_rejection(error):
            raise error
        turn.deadline.check()
        other = self._another(turn, worker)
        if other is None:
            # Its engine may have failed at the transfer, which is left out now.
            if worker_is_down(error) or not turn.transfer_params:
                raise error
            other = worker
        self._drop_used_params(turn, other, error)
        return other

    def _another(self, turn: Turn, failed: registry_pb2.Worker) -> registry_pb2.Worker | None:
        candidates = self._pool.candidates(turn.request.model, common_pb2.WORKER_ROLE_DECODE)
        others = [entry for entry in candidates if entry.worker_id != failed.worker_id]
        return first_usable(rank_decode(others, holder_id="", last_id="", rng=self._rng))

    def _drop_used_params(self, turn: Turn, other: registry_pb2.Worker, error: KvloopError) -> None:
        """Keep the hand-over only if nobody can have read it and the other can."""
        if not turn.transfer_params:
            return
        source = turn.prefill_worker
        readable = source is not None and hand_over_obstacle(source, other) is None
        if not (params_unused(error) and readable):
            turn.transfer_params = b""
            self._metrics.fell_back(Fallback.HANDOVER_DROPPED)
