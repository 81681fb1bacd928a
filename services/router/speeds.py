"""What legs cost, apart from waiting, learnt from those that this router ran. Pure rules.

Nothing is asked for it: a prefill leg's reply says what was computed and pulled and
what the worker had expected, and a decode leg's first chunk when decode was ready.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import duration_pb2

from kvloop.common.v1 import common_pb2
from services.router.cost_lines import CostLine

_LEAST_SAMPLES = 3
"""Legs before their figures count."""
_LEAST_TOKENS = 256
"""Fewer computed tokens are mostly overhead."""
_FORGET_TOLD = 200
"""After so many legs in a row that were timed and said nothing, whoever said something
is taken to have left."""
_FAILED_PULLS = frozenset(
    {common_pb2.MISS_REASON_PULL_FAILED, common_pb2.MISS_REASON_ENGINE_EXPIRED}
)


@dataclass(frozen=True, slots=True)
class Speeds:
    """What legs cost, apart from waiting. Seconds, per token or per leg."""

    compute_token: float = 100e-6
    """Computing one prompt token, attention aside."""
    compute_pair: float = 0.0
    """Attention of one prompt token to one token before it."""
    pull_base: float = 0.01
    """Before the first token of a pull from decode to prefill."""
    pull_token: float = 10e-6
    hand_over_base: float = 0.02
    """Decode's first token, before what it has to read from prefill."""
    hand_over_token: float = 10e-6

    def hand_over(self, tokens: int) -> float:
        """A decode leg up to its first token that reads so many from prefill."""
        return self.hand_over_base + self.hand_over_token * tokens

    def prefill(self, prompt: int, held: int, cached: int = 0) -> float:
        """A prefill leg: pulling what is held and not cached and computing the rest,
        or computing all that is not cached if that is faster, as the worker's own
        guard decides."""
        whole = self.compute(cached, prompt)
        if held <= cached:
            return whole
        pull = self.pull_base + self.pull_token * (held - cached)
        return min(whole, pull + self.compute(held, prompt))

    def compute(self, start: int, end: int) -> float:
        """Computing the tokens from `start` up to `end`."""
        pairs = (end * end - start * start) / 2
        return self.compute_token * (end - start) + self.compute_pair * pairs


ASSUMED = Speeds()
"""Before anything was measured: ranks by the length of queues."""


class SpeedLines:
    """Figures of one worker, or of all workers of a model together.

    A prefill worker that knows its engine's speed and its links says with each handle
    what it expected. It sees all legs, of all routers, so what it says counts and
    what this router timed from outside does not, until such workers have left.
    """

    __slots__ = ("_compute", "_hand_over", "_pull", "_told", "_untold", "speeds")

    def __init__(self) -> None:
        self._compute = CostLine(proportional=False)
        self._pull = CostLine(proportional=True)
        self._hand_over = CostLine(proportional=True)
        self._told = False
        self._untold = 0  # legs in a row that could only be timed
        self.speeds = ASSUMED

    @property
    def measured(self) -> bool:
        """Whether anything is known."""
        return max(self._compute.samples, self._hand_over.samples) >= _LEAST_SAMPLES

    @property
    def told(self) -> bool:
        """Whether the figures are those of the workers themselves."""
        return self._told and self._compute.samples >= _LEAST_SAMPLES

    def prefilled(self, report: common_pb2.PrefillReport, service_seconds: float) -> None:
        """A prefill leg reported.

        Args:
            report: what the engine did.
            service_seconds: how long it seems to have been at it.
        """
        wanted = report.proven_tokens - report.cached_tokens
        if wanted > 0 and report.HasField("expected_recompute"):
            self._untold = 0
            self._rely_on(told=True)
            self._computed(report.cached_tokens, wanted, _seconds(report.expected_recompute))
        elif (
            not report.pulled_tokens
            and report.miss_reason not in _FAILED_PULLS
            and report.recomputed_tokens >= _LEAST_TOKENS
        ):
            self._untold += 1
            if self._untold >= _FORGET_TOLD:
                self._rely_on(told=False)
            if not self._told:
                self._computed(report.cached_tokens, report.recomputed_tokens, service_seconds)
        if wanted > 0 and report.HasField("expected_pull"):
            self._pull.add(wanted, _seconds(report.expected_pull))
        elif report.pulled_tokens:
            self._pull.add(report.pulled_tokens, _seconds(report.pull_duration))

    def handed_over(self, tokens: int, seconds: float) -> None:
        """Decode had its first token after reading so many from prefill."""
        self._hand_over.add(tokens, seconds)

    def settle(self, otherwise: Speeds) -> None:
        """Bring `speeds` up to date; what was not measured is as it is otherwise."""
        compute, pull, hand_over = self._compute, self._pull, self._hand_over
        known = compute.samples >= _LEAST_SAMPLES
        pulls = pull.samples >= _LEAST_SAMPLES
        hands = hand_over.samples >= _LEAST_SAMPLES
        self.speeds = Speeds(
            compute_token=compute.base if known else otherwise.compute_token,
            compute_pair=compute.slope if known else otherwise.compute_pair,
            pull_base=pull.base if pulls else otherwise.pull_base,
            pull_token=pull.slope if pulls else otherwise.pull_token,
            hand_over_base=hand_over.base if hands else otherwise.hand_over_base,
            hand_over_token=hand_over.slope if hands else otherwise.hand_over_token,
        )

    def _rely_on(self, *, told: bool) -> None:
        """Start afresh if what counts is no longer the same."""
        if told != self._told:
            self._told, self._compute = told, CostLine(proportional=False)

    def _computed(self, before: int, tokens: int, seconds: float) -> None:
        # Attention is a matter of seconds per token, which grow with the context.
        self._compute.add(before + tokens / 2, seconds / tokens, tokens / 1000)


def _seconds(duration: duration_pb2.Duration) -> float:
    return float(duration.seconds + duration.nanos * 1e-9)
