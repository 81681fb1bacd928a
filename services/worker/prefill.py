"""The prefill leg: one token, KV handed over."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import structlog

from kvloop.errors import InternalError, KvloopError
from services.worker.engine import Api, Engine
from services.worker.handoff import Handoff, PrefillReport, read_reply
from services.worker.legs import Body, parse_body, prefill_body, require_splittable
from services.worker.metrics import WorkerMetrics

_log = structlog.get_logger(__name__)

PULL_FAILED = "PULL_FAILED"
"""Name of the MissReason for a handle with which the engine failed."""


@dataclass(frozen=True)
class PrefillOrder:
    """One prefill leg to run."""

    turn_id: str
    api: Api
    body: bytes
    """The client's body, a JSON object."""
    handle: bytes
    """Params that the ledger gave out; empty for none."""


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
        metrics: counts what went missing.
    """

    def __init__(self, engine: Engine, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._warned_of_missing_report = False

    async def run(self, order: PrefillOrder) -> PrefillResult:
        """Run one leg.

        If the engine fails while it has a handle, the leg is repeated once
        without: with vLLM's load failure policy "fail", a pull that breaks ends
        the request with a server error.

        Raises:
            InvalidFieldError: the body or the params are at fault.
            KvloopError: as for the Engine port.
        """
        members = parse_body(order.body)
        require_splittable(order.api, members)
        if not order.handle:
            return self._result(order, await self._prefill(order, members, b""))
        try:
            return self._result(order, await self._prefill(order, members, order.handle))
        except InternalError as error:
            failure = error
        self._metrics.handles_dropped.inc()
        _log.warning(
            "prefill_repeated_without_handle",
            turn_id=order.turn_id,
            http_status=failure.metadata.get("http_status"),
        )
        try:
            result = self._result(order, await self._prefill(order, members, b""))
        except KvloopError as error:
            # The second error may say that the engine was not reached, or that
            # it refused: true of the second request, not of the handle.
            raise failure from error
        return replace(
            result, report=msgspec.structs.replace(result.report, miss_reason=PULL_FAILED)
        )

    async def _prefill(self, order: PrefillOrder, members: Body, handle: bytes) -> Handoff:
        body = prefill_body(members, turn_id=order.turn_id, handle=handle)
        return read_reply(await self._engine.complete(order.api, body))

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
