"""Says where a turn would go and why, with the pipeline's own rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf import duration_pb2

from kvloop.common.v1 import common_pb2
from kvloop.compatibility import pull_obstacle
from kvloop.errors import KvloopError, NotFoundError
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.router.v1 import router_pb2
from kvloop.worker.v1 import worker_pb2
from services.router.identity import conversation_key
from services.router.ledger import Ledger
from services.router.policy import Ranked, first_usable
from services.router.routing import Conversation, Routes, affinity_of
from services.router.turn import admit
from services.router.workers import WorkerPool

_State = ledger_pb2.Conversation
_MISSES: dict[int, common_pb2.MissReason.ValueType] = {
    _State.STATE_AVAILABLE: common_pb2.MISS_REASON_UNSPECIFIED,
    _State.STATE_TAKEN: common_pb2.MISS_REASON_TAKEN,
    _State.STATE_SPENT: common_pb2.MISS_REASON_SPENT,
    _State.STATE_RELEASED: common_pb2.MISS_REASON_RELEASED,
    _State.STATE_EXPIRED: common_pb2.MISS_REASON_EXPIRED,
    _State.STATE_VOID: common_pb2.MISS_REASON_VOID,
}


@dataclass(frozen=True)
class _Retained:
    """What the ledger would answer to a turn, read without opening one."""

    miss_reason: common_pb2.MissReason.ValueType
    worker_id: str = ""
    num_tokens: int = 0
    remaining_ttl: duration_pb2.Duration | None = None

    @property
    def available(self) -> bool:
        return self.miss_reason == common_pb2.MISS_REASON_UNSPECIFIED


class Explainer:
    """Ranks workers for a turn that might come, and changes nothing.

    Args:
        pool: the live workers.
        ledger: read only.
        routes: ranks them, as for a turn.
        timeout_seconds: how long the ledger may take.
        estimate_timeout_seconds: how long a prefill worker may take to say what a
            pull would take.
    """

    def __init__(
        self,
        pool: WorkerPool,
        ledger: Ledger,
        routes: Routes,
        *,
        timeout_seconds: float,
        estimate_timeout_seconds: float,
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._routes = routes
        self._timeout_seconds = timeout_seconds
        self._estimate_timeout_seconds = estimate_timeout_seconds

    async def explain(
        self, tenant: str, model: str, conversation_id: str
    ) -> router_pb2.ExplainRouteResponse:
        """The ranking of every worker of the model, and what reuse would do.

        Raises:
            ModelNotFoundError: no worker serves the model.
            UnavailableError: no worker can take a turn now.
        """
        admit(model, self._pool.models())
        retained = await self._retained(tenant, model, conversation_id)
        source = self._source(retained)
        # Nothing is known of the prompt yet, but that it extends what is retained.
        known = Conversation(
            holder_id=source.worker_id if source is not None else "",
            held_tokens=retained.num_tokens if source is not None else 0,
            last_id=retained.worker_id,
            affinity=affinity_of(tenant, conversation_id),
        )
        facts = self._routes.facts_of(model, retained.num_tokens, known)
        prefill, decode = self._routes.rank(model, facts, holder=source)
        miss_reason = retained.miss_reason
        estimate = worker_pb2.EstimatePullResponse()
        if retained.available:
            puller = first_usable(prefill)
            if puller is None or source is None or pull_obstacle(puller, source) is not None:
                miss_reason = common_pb2.MISS_REASON_INCOMPATIBLE
            else:
                estimate = await self._estimate(puller, source, retained.num_tokens)
        return router_pb2.ExplainRouteResponse(
            candidates=[*_candidates(prefill), *_candidates(decode)],
            handle_available=retained.available,
            miss_reason=miss_reason,
            retained_tokens=retained.num_tokens,
            remaining_ttl=retained.remaining_ttl,
            expected_pull=estimate.pull if estimate.HasField("pull") else None,
            expected_recompute=estimate.recompute if estimate.HasField("recompute") else None,
            pull_tokens=estimate.pull_tokens,
            pull_reason=estimate.reason,
        )

    def _source(self, retained: _Retained) -> registry_pb2.Worker | None:
        """The worker that a turn could pull from: one that can be reached."""
        holder = self._pool.find(retained.worker_id) if retained.available else None
        return holder.worker if holder is not None and holder.reachable else None

    async def _estimate(
        self, puller: registry_pb2.Worker, source: registry_pb2.Worker, num_tokens: int
    ) -> worker_pb2.EstimatePullResponse:
        """The puller's own estimate; with nothing but the reason if it gives none."""
        request = worker_pb2.EstimatePullRequest(
            engine=source.engine, num_tokens=max(num_tokens, 1)
        )
        try:
            with self._pool.use(puller.worker_id, is_leg=False) as client:
                return await client.estimate_pull(
                    request, timeout_seconds=self._estimate_timeout_seconds
                )
        except KvloopError:
            return worker_pb2.EstimatePullResponse(
                reason=f"{puller.worker_id} did not say what it measured"
            )

    async def _retained(self, tenant: str, model: str, conversation_id: str) -> _Retained:
        if not conversation_id:
            return _Retained(common_pb2.MISS_REASON_NO_CONVERSATION)
        try:
            found = await self._ledger.get_conversation(
                conversation_key(tenant, model, conversation_id),
                timeout_seconds=self._timeout_seconds,
            )
        except NotFoundError:
            return _Retained(common_pb2.MISS_REASON_FIRST_TURN)
        except KvloopError:
            return _Retained(common_pb2.MISS_REASON_LEDGER_UNAVAILABLE)
        return _Retained(
            _MISSES.get(found.state, common_pb2.MISS_REASON_FIRST_TURN),
            worker_id=found.worker_id,
            num_tokens=found.num_tokens,
            remaining_ttl=found.remaining_ttl,
        )


def _candidates(ranking: Iterable[Ranked]) -> list[router_pb2.Candidate]:
    return [
        router_pb2.Candidate(
            worker_id=entry.worker.worker_id,
            role=entry.worker.role,
            in_flight=entry.candidate.in_flight,
            score=entry.score,
            chosen=place == 0 and entry.usable,
            reason=entry.reason,
        )
        for place, entry in enumerate(ranking)
    ]
