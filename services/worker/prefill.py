"""The prefill leg: one token, KV handed over."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import structlog

from kvloop.errors import InternalError, KvloopError
from services.worker.engine import Api, BegunRequest, Engine
from services.worker.event_messages import EngineRef
from services.worker.handoff import Handoff, PrefillReport, read_reply
from services.worker.metrics import WorkerMetrics
from services.worker.prefill_body import HandleTerms, rest_of_prefill_body
from services.worker.prepared_request import finish
from services.worker.pull_costs import PullCosts

_log = structlog.get_logger(__name__)

PULL_FAILED = "PULL_FAILED"
"""Name of the MissReason for a handle with which the engine failed."""


@dataclass(frozen=True)
class PrefillOrder:
    """One prefill leg to run."""

    turn_id: str
    api: Api
    head: bytes
    """The client's body, from `read_prefill_body`."""
    handle: bytes
    """Params that the ledger gave out; empty for none."""
    engine: EngineRef | None = None
    """Decode engine that the handle is of; None without a handle, or if unknown."""
    extension_seconds: float = 0.0
    """By how much that engine's deadline was moved since it wrote the handle."""
    hand_token_ids_over: bool = False
    """Hand over the prompt's token ids too."""
    begun: BegunRequest | None = None
    """The request to the engine, if it has the head already. Whoever gives the order
    closes it."""


@dataclass(frozen=True)
class PrefillResult:
    """What the prefill leg leaves for the decode leg."""

    params: bytes
    """Empty if the engine handed nothing over: decode computes the prompt."""
    report: PrefillReport


class PrefillLeg:
    """Runs prefill legs on one engine.

    Args:
        engine: a prefill engine.
        costs: learns from legs what pulling and recomputing take.
        metrics: counts what went missing.
    """

    def __init__(self, engine: Engine, costs: PullCosts, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._costs = costs
        self._metrics = metrics
        self._warned_of_missing_report = False

    async def run(self, order: PrefillOrder) -> PrefillResult:
        """Run one leg.

        If the engine fails while it has a handle, the leg is repeated once
        without: with vLLM's load failure policy "fail", a pull that breaks ends
        the request with a server error.

        Raises:
            InvalidFieldError: the params are at fault.
            KvloopError: as for the Engine port.
        """
        with self._costs.leg(order.engine if order.handle else None) as measured:
            terms = HandleTerms(order.extension_seconds, measured.costs)
            result, reported = await self._run(order, terms)
            if reported:
                measured.report = result.report
        return result

    async def _run(self, order: PrefillOrder, terms: HandleTerms) -> tuple[PrefillResult, bool]:
        """The result, and whether its report is the connector's own."""
        if not order.handle:
            handoff = await self._prefill(order, b"", begun=order.begun)
            return self._result(order, handoff), handoff.reported
        try:
            handoff = await self._prefill(order, order.handle, terms, begun=order.begun)
            return self._result(order, handoff), handoff.reported
        except InternalError as error:
            failure = error
        self._metrics.handles_dropped.inc()
        _log.warning(
            "prefill_repeated_without_handle",
            turn_id=order.turn_id,
            http_status=failure.metadata.get("http_status"),
        )
        try:
            handoff = await self._prefill(order, b"")
        except KvloopError as error:
            # The second error may say that the engine was not reached, or that
            # it refused: true of the second request, not of the handle.
            raise failure from error
        result = self._result(order, handoff)
        report = msgspec.structs.replace(result.report, miss_reason=PULL_FAILED)
        return replace(result, report=report), handoff.reported

    async def _prefill(
        self,
        order: PrefillOrder,
        handle: bytes,
        terms: HandleTerms | None = None,
        *,
        begun: BegunRequest | None = None,
    ) -> Handoff:
        rest = rest_of_prefill_body(
            turn_id=order.turn_id,
            handle=handle,
            terms=terms,
            hand_token_ids_over=order.hand_token_ids_over,
        )
        replying = await finish(begun, rest, self._metrics)
        if replying is not None:
            return read_reply(await replying.complete())
        return read_reply(await self._engine.complete(order.api, order.head + rest))

    def _result(self, order: PrefillOrder, handoff: Handoff) -> PrefillResult:
        if handoff.missing is not None:
            self._metrics.handoffs_missing.labels(
                api=order.api.name.lower(), reason=handoff.missing
            ).inc()
            _log.warning(
                "prefill_handed_nothing_over",
                turn_id=order.turn_id,
                api=order.api,
                reason=handoff.missing,
            )
        elif not handoff.reported:
            self._metrics.reports_missing.inc()
            if not self._warned_of_missing_report:
                self._warned_of_missing_report = True
                _log.error(
                    "prefill_report_missing",
                    hint="the engine runs without kvloop's connector: nothing is proven, and "
                    "a pull may read the wrong tokens; start it with kv_connector="
                    "KvloopConnector and kv_connector_module_path=services.worker.connector",
                )
        return PrefillResult(handoff.params, handoff.report)
