"""What the router counts. Every miss, fallback and return has a name here."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvloop.common.v1 import common_pb2
from services.router.breaker import BreakerState
from services.router.moves import Move
from services.router.preparation import Prepared

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_MISS_PREFIX = "MISS_REASON_"


class Outcome(Enum):
    """How a turn ended."""

    ANSWERED = "answered"
    """The whole answer was sent."""
    REJECTED = "rejected"
    """The request was at fault."""
    TURNED_AWAY = "turned_away"
    """A limit on turns was reached, or no turn ended in time to make room."""
    FAILED = "failed"
    """No worker could answer, or the answer broke off."""
    CANCELLED = "cancelled"
    """The caller hung up or its deadline passed."""


class Fallback(Enum):
    """A way in which a turn was answered, but not as planned."""

    PREFILL_REPEATED = "prefill_repeated"
    """A prefill leg failed and was run again."""
    PREFILL_LEFT_OUT = "prefill_left_out"
    """No prefill worker could run its leg; the decode worker computed the prompt."""
    NO_HANDOVER = "no_handover"
    """A prefill engine handed nothing over; the decode worker computed the prompt."""
    DECODE_REPEATED = "decode_repeated"
    """A decode leg failed before its first chunk and was run again."""
    HANDOVER_DROPPED = "handover_dropped"
    """The repeated decode leg could not use what the prefill leg had computed."""
    HOLDER_UNREACHABLE = "holder_unreachable"
    """The worker that holds the conversation's KV is unknown or unreachable."""
    HOLDER_RESTARTED = "holder_restarted"
    """The worker that held the conversation's KV has another engine by now."""
    HANDLE_LEADS_ELSEWHERE = "handle_leads_elsewhere"
    """The handle names another engine or address than its worker has registered."""
    NO_COMPATIBLE_PREFILL = "no_compatible_prefill"
    """No usable prefill worker could pull from the worker that holds the KV."""
    LENGTH_CHECK_SKIPPED = "length_check_skipped"
    """A long prompt could not be counted beforehand; the engine checks it."""


class HandleReturn(Enum):
    """What became of a handle that was not used."""

    UNUSED = "unused"
    """Returned by a turn that had no use for it."""
    LATE = "late"
    """Returned because the ledger's answer came after the turn had gone on."""
    NOT_HELD = "not_held"
    """The ledger had given it up already."""
    FAILED = "failed"
    """The ledger could not be told: the pin stays until its deadline."""


class RouterMetrics:
    """Counters of one router, on the registry given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._turns = Counter(
            "kvloop_router_turns", "Turns by how they ended.", ["outcome"], registry=registry
        )
        self._misses = Counter(
            "kvloop_router_misses",
            "Answered turns that pulled nothing, by reason.",
            ["reason"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "kvloop_router_fallbacks",
            "Turns that did not go as planned, by cause.",
            ["cause"],
            registry=registry,
        )
        self._moves = Counter(
            "kvloop_router_turns_moved",
            "Turns that left their conversation's decode worker for another, by reason.",
            ["reason"],
            registry=registry,
        )
        self._returns = Counter(
            "kvloop_router_handle_returns",
            "Handles that were taken and not used, by what became of them.",
            ["outcome"],
            registry=registry,
        )
        self._prepared = Counter(
            "kvloop_router_bodies_ahead",
            "Bodies that were to go ahead of their leg, by what became of them.",
            ["leg", "outcome"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "kvloop_router_prompt_tokens",
            "Prompt tokens of prefill legs, by where their KV came from.",
            ["source"],
            registry=registry,
        )
        self._proven_tokens = Counter(
            "kvloop_router_proven_tokens",
            "Prompt tokens that prefill engines proved equal to what decode engines hold.",
            registry=registry,
        )
        self._ttft = Histogram(
            "kvloop_router_ttft_seconds",
            "Start of the turn to the first chunk.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._prefill_leg = Histogram(
            "kvloop_router_prefill_leg_seconds",
            "Duration of prefill legs.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._decode_leg = Histogram(
            "kvloop_router_decode_leg_seconds",
            "Start of the decode leg to the first chunk.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._itl = Histogram(
            "kvloop_router_itl_seconds",
            "Mean inter-token latency of each streamed answer.",
            registry=registry,
            buckets=_TOKEN_SECONDS,
        )
        self._errors = Counter(
            "kvloop_router_errors",
            "Turns that were not answered to their end, by the error's reason.",
            ["reason"],
            registry=registry,
        )
        self._running = Gauge(
            "kvloop_router_running_turns", "Turns that run now.", registry=registry
        )
        self._waiting = Gauge(
            "kvloop_router_waiting_turns",
            "Turns that wait for another of their tenant and model to end.",
            registry=registry,
        )
        self._channels = Gauge(
            "kvloop_router_worker_channels",
            "Open channels to workers: one each, and those of workers that have left and "
            "still have turns here.",
            registry=registry,
        )
        self._matched_tokens = Counter(
            "kvloop_router_matched_tokens",
            "Tokens that the ledger knew to be retained for answered turns when their "
            "workers were chosen. What was proven of them is counted beside it.",
            registry=registry,
        )
        self._degraded = Gauge(
            "kvloop_router_reuse_degraded",
            "1 while most turns leave no retained KV behind: turns are routed by load alone.",
            registry=registry,
        )
        self._breakers = Gauge(
            "kvloop_router_breakers",
            "Workers by what their circuit breaker lets through.",
            ["state"],
            registry=registry,
        )
        self._openings = Counter(
            "kvloop_router_breaker_openings",
            "Times that a worker was taken out because it could not be reached or failed.",
            registry=registry,
        )
        # So that every label is there from the start, and not looked up for each turn.
        self._ended = {outcome: self._turns.labels(outcome.value) for outcome in Outcome}
        self._pulled, self._cached, self._recomputed = (
            self._prompt_tokens.labels(source) for source in ("pulled", "cached", "recomputed")
        )
        for fallback in Fallback:
            self._fallbacks.labels(fallback.value)
        for move in Move:
            self._moves.labels(move.value)
        for handle_return in HandleReturn:
            self._returns.labels(handle_return.value)

    def watch_queue(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Show how many turns run and wait, as these say when Prometheus asks."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def watch_channels(self, count: Callable[[], int]) -> None:
        """Show how many channels are open, as this says when Prometheus asks."""
        self._channels.set_function(count)

    def watch_breakers(self, count: Callable[[BreakerState], int]) -> None:
        """Show how many workers' breakers are in each state."""
        for state in BreakerState:
            self._breakers.labels(state.value).set_function(partial(count, state))

    def watch_reuse(self, degraded: Callable[[], bool]) -> None:
        """Show whether turns leave nothing behind, as this says."""
        self._degraded.set_function(lambda: float(degraded()))

    def matched(self, tokens: int) -> None:
        """Count tokens that the ledger knew to be retained for a turn."""
        self._matched_tokens.inc(tokens)

    def breaker_opened(self) -> None:
        """Count one breaker that opened."""
        self._openings.inc()

    def turn_ended(self, outcome: Outcome) -> None:
        """Count one turn."""
        self._ended[outcome].inc()

    def missed(self, reason: common_pb2.MissReason.ValueType) -> None:
        """Count one answered turn that pulled nothing."""
        name = common_pb2.MissReason.Name(reason).removeprefix(_MISS_PREFIX)
        self._misses.labels(name.lower()).inc()

    def fell_back(self, cause: Fallback) -> None:
        """Count one departure from the plan."""
        self._fallbacks.labels(cause.value).inc()

    def moved(self, reason: Move) -> None:
        """Count one turn that left its conversation's decode worker."""
        self._moves.labels(reason.value).inc()

    def handle_returned(self, outcome: HandleReturn) -> None:
        """Count one handle that was taken and not used."""
        self._returns.labels(outcome.value).inc()

    def prepared(self, leg: Literal["prefill", "decode"], outcome: Prepared) -> None:
        """Count one leg whose body was to go ahead."""
        self._prepared.labels(leg, outcome.value).inc()

    def prefilled(self, report: common_pb2.PrefillReport, seconds: float) -> None:
        """Count what one prefill leg did."""
        self._proven_tokens.inc(report.proven_tokens)
        self._pulled.inc(report.pulled_tokens)
        self._cached.inc(report.cached_tokens)
        self._recomputed.inc(report.recomputed_tokens)
        self._prefill_leg.observe(seconds)

    def first_chunk(self, ttft_seconds: float, decode_leg_seconds: float) -> None:
        """Record one time to first token, and the decode leg's part of it."""
        self._ttft.observe(ttft_seconds)
        self._decode_leg.observe(decode_leg_seconds)

    def streamed(self, itl_seconds: float) -> None:
        """Record the mean inter-token latency of one streamed answer."""
        self._itl.observe(itl_seconds)

    def turn_error(self, reason: str) -> None:
        """Count one error that ended a turn; reasons are those of kvloop.errors."""
        self._errors.labels(reason.lower()).inc()
