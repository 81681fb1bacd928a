"""What is counted, logged and remembered of a turn when it ends."""

from __future__ import annotations

import structlog

from kvloop.common.v1 import common_pb2
from kvloop.errors import DeadlineError, KvloopError, ModelNotFoundError
from kvloop.worker.v1 import worker_pb2
from services.router import receipt
from services.router.deadline import Clock
from services.router.failures import is_rejection
from services.router.metrics import Outcome, RouterMetrics
from services.router.reuse_watch import ReuseWatch
from services.router.status.entry import entry_of
from services.router.status.journal import TurnJournal
from services.router.turn_span import turn_attributes
from services.router.turn_state import Turn

_log = structlog.get_logger(__name__)
_RETAINED = frozenset({worker_pb2.COMMIT_OUTCOME_COMMITTED, worker_pb2.COMMIT_OUTCOME_SUPERSEDED})
"""Outcomes that leave the conversation's KV in the ledger, this turn's or a newer one's."""


class TurnEnds:
    """Notes how turns end. Each turn ends once, in one of these ways.

    Args:
        metrics: counts them.
        journal: remembers them for the status page.
        reuse: notices when they leave nothing behind.
        clock: seconds on a clock that never goes back.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        journal: TurnJournal,
        reuse: ReuseWatch,
        *,
        clock: Clock,
        wall_clock: Clock,
    ) -> None:
        self._metrics = metrics
        self._journal = journal
        self._reuse = reuse
        self._clock = clock
        self._wall_clock = wall_clock

    def answered(self, turn: Turn) -> None:
        """The whole answer was sent."""
        reason = receipt.miss_reason(turn)
        if reason != common_pb2.MISS_REASON_UNSPECIFIED:
            self._metrics.missed(reason)
        self._metrics.matched(turn.facts.held_tokens)
        if turn.commit is not None and turn.summary is not None:
            outcome = turn.summary.commit_outcome
            name = worker_pb2.CommitOutcome.Name(outcome).removeprefix("COMMIT_OUTCOME_")
            self._reuse.ended(retained=outcome in _RETAINED, outcome=name)
        if turn.first_chunk_at is not None:
            self._metrics.first_chunk(receipt.ttft_seconds(turn), receipt.decode_leg_seconds(turn))
            between = _completion_tokens(turn) - 1
            if between > 0 and not turn.request.whole:
                self._metrics.streamed((self._clock() - turn.first_chunk_at) / between)
        self._ended(turn, Outcome.ANSWERED)

    def failed(self, turn: Turn, error: KvloopError) -> None:
        """The turn could not be answered, or not to its end."""
        outcome = Outcome.FAILED
        if is_rejection(error) or isinstance(error, ModelNotFoundError):
            outcome = Outcome.REJECTED
        elif isinstance(error, DeadlineError) and turn.deadline.passed:
            outcome = Outcome.CANCELLED
        self._metrics.turn_error(error.reason)
        self._ended(turn, outcome, error.reason)

    def cancelled(self, turn: Turn) -> None:
        """The caller hung up."""
        self._ended(turn, Outcome.CANCELLED)

    def broke(self, turn: Turn) -> None:
        """A defect ended the turn. The edge logs it."""
        self._ended(turn, Outcome.FAILED, "INTERNAL")

    def _ended(self, turn: Turn, outcome: Outcome, error: str = "") -> None:
        self._metrics.turn_ended(outcome)
        if turn.move is not None:
            self._metrics.moved(turn.move)
        if turn.span.recording:
            turn.span.tell(turn_attributes(turn, outcome.value))
        more = {"error": error} if error else {}
        _log.info("turn", **_facts(turn), outcome=outcome.value, **more)
        now, wall = self._clock(), self._wall_clock()
        self._journal.record(entry_of(turn, outcome=outcome.value, error=error, now=now, wall=wall))


def _completion_tokens(turn: Turn) -> int:
    """Tokens of the answer; 0 if they were not counted."""
    return turn.summary.usage.completion_tokens if turn.summary is not None else 0


def _facts(turn: Turn) -> dict[str, object]:
    """What the log says of a turn; never its content."""
    report = turn.report or common_pb2.PrefillReport()
    usage = turn.summary.usage if turn.summary is not None else common_pb2.Usage()
    return {
        "turn_id": turn.turn_id,
        "model": turn.request.model,
        "turn_number": turn.number,
        "prefill_worker_id": turn.prefill_worker.worker_id if turn.prefill_worker else None,
        "decode_worker_id": turn.decode_worker.worker_id if turn.decode_worker else None,
        "moved": turn.move.value if turn.move is not None else None,
        "handle_hit": turn.handle_hit,
        "miss_reason": common_pb2.MissReason.Name(receipt.miss_reason(turn)),
        "prompt_tokens": report.prompt_tokens or usage.prompt_tokens,
        "pulled_tokens": report.pulled_tokens,
        "cached_tokens": report.cached_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "completion_tokens": usage.completion_tokens,
        "prefill_leg_ms": round(turn.prefill_seconds * 1e3, 1),
        "decode_leg_ms": round(receipt.decode_leg_seconds(turn) * 1e3, 1),
        "ttft_ms": round(receipt.ttft_seconds(turn) * 1e3, 1),
    }
