"""The way in for every API: who is asking, may it run now, until when."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from kvloop.errors import KvloopError
from services.common.tracing import NO_HEADERS, NoTracing, Tracing, current, running
from services.router.admission import TurnAdmission
from services.router.deadline import Clock, Deadline
from services.router.identity import Caller
from services.router.keys import Authenticator
from services.router.metrics import Outcome, RouterMetrics
from services.router.request import TurnRequest
from services.router.turn import AnswerEnd, TurnPipeline


class Reception:
    """Admits turns to the pipeline.

    Args:
        authenticator: knows callers by their credential.
        admission: limits how many turns run.
        pipeline: answers turns.
        metrics: counts turns that are turned away.
        clock: seconds on a clock that never goes back.
        max_turn_seconds: how long a turn may take whose caller sets no deadline,
            or a later one.
        deadline_margin_seconds: how much earlier each hop has to end.
        tracing: where the spans of turns begin; nowhere if omitted.
    """

    def __init__(
        self,
        *,
        authenticator: Authenticator,
        admission: TurnAdmission,
        pipeline: TurnPipeline,
        metrics: RouterMetrics,
        clock: Clock,
        max_turn_seconds: float,
        deadline_margin_seconds: float,
        tracing: Tracing | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._admission = admission
        self._pipeline = pipeline
        self._metrics = metrics
        self._clock = clock
        self._max_turn_seconds = max_turn_seconds
        self._deadline_margin_seconds = deadline_margin_seconds
        self._tracing = tracing or NoTracing()

    def caller(self, authorization: str | None) -> Caller:
        """Who is asking.

        Raises:
            UnauthenticatedError: the credential is missing or not valid.
        """
        return self._authenticator.caller(authorization)

    def deadline(self, seconds: float | None = None) -> Deadline:
        """When a call must be over that came now.

        Args:
            seconds: what the caller allows; None if it does not say.
        """
        limit = self._max_turn_seconds
        left = limit if seconds is None else min(seconds, limit)
        return Deadline(self._clock() + left, self._clock, self._deadline_margin_seconds)

    def new_turn_id(self) -> str:
        """An id for a turn."""
        return self._pipeline.new_turn_id()

    def refused(self) -> None:
        """Count a request that was at fault before it became a turn."""
        self._metrics.turn_ended(Outcome.REJECTED)

    async def run(
        self,
        request: TurnRequest,
        deadline: Deadline,
        turn_id: str | None = None,
        trace_headers: Mapping[str, str] = NO_HEADERS,
    ) -> AsyncGenerator[Sequence[bytes] | AnswerEnd, None]:
        """The answer, as `TurnPipeline.run` gives it, once the turn may run.

        Args:
            request: what to answer.
            deadline: when it must be over.
            turn_id: from `new_turn_id`, for callers that have to know it before.
            trace_headers: the caller's trace context.

        Raises:
            KvloopError: why the turn was not admitted, or could not be answered.
        """
        with running(self._tracing.server_span("turn", trace_headers)):
            async with (
                self._admitted(request),
                aclosing(self._pipeline.run(request, deadline, turn_id)) as events,
            ):
                async for event in events:
                    yield event

    @asynccontextmanager
    async def _admitted(self, request: TurnRequest) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._admission.turn(request.tenant, request.model))
                current().event("admitted")
            except KvloopError:
                self._metrics.turn_ended(Outcome.TURNED_AWAY)
                raise
            yield
