"""How much of a proven prefix to pull, so that a pull never costs more than computing.

Pulling tokens takes a latency and a time per token. Computing them takes a time
per token that grows with the context before it, so what a pull of the leading n
tokens saves is convex in n, and what it costs is linear. The difference is
greatest at one of the ends: all or nothing, never a part. A third choice, a small
probe, is no optimum either. It is what a look at the link costs: at first
contact, and from time to time while pulls are held back, to see a bad link recover.

The costs are measured by the sidecar and travel with the handle; this module
compares them for one prompt. It runs inside vLLM's scheduler and inside the
sidecar: only the standard library is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

COSTS = "kvloop_costs"
"""Member of kv_transfer_params by which the sidecar hands the costs over."""
SLOWER_THAN_RECOMPUTE = "SLOWER_THAN_RECOMPUTE"
"""Name of the MissReason for a pull that this module decided against."""


@dataclass(frozen=True)
class PullCost:
    """What pulling takes."""

    latency_seconds: float
    """Before the first token."""
    seconds_per_token: float

    def seconds(self, tokens: int) -> float:
        """Time for a pull of so many tokens; 0 for none."""
        return self.latency_seconds + self.seconds_per_token * tokens if tokens > 0 else 0.0


@dataclass(frozen=True)
class RecomputeCost:
    """What computing takes: a token after c others, seconds_per_token and
    seconds_per_token_and_context * c."""

    seconds_per_token: float
    seconds_per_token_and_context: float

    def seconds(self, start: int, end: int) -> float:
        """Time to compute the tokens from `start` up to `end`."""
        if end <= start:
            return 0.0
        contexts = (end * end - start * start) / 2
        return self.seconds_per_token * (end - start) + (
            self.seconds_per_token_and_context * contexts
        )


@dataclass(frozen=True)
class Probe:
    """How large a probe may be."""

    tokens: int = 0
    """Tokens to pull at most; 0: no probe is due."""
    min_tokens: int = 0
    """Tokens below which the engine pulls nothing: its kv_recompute_threshold."""
    share: float = 0.0
    """The probe may lengthen the turn by this share of computing its prompt, ..."""
    seconds: float | None = 0.0
    """... or by this, whichever is more. None: by any time."""
    whole: bool = False
    """True if the engine cannot cut a pull (hybrid models): a probe is all or nothing."""


@dataclass(frozen=True)
class Costs:
    """What is known of one prefill engine and its link to one decode engine."""

    pull: PullCost | None = None
    """As measured; None before that."""
    assumed_pull: PullCost | None = None
    """A pessimistic guess for an unmeasured link; None if the size of the KV is
    unknown."""
    recompute: RecomputeCost | None = None
    """As measured; None before that."""
    probe: Probe = Probe()

    def to_params(self) -> dict[str, Any]:
        """The form that travels in kv_transfer_params."""
        return {
            "pull": _pull_params(self.pull),
            "assumed_pull": _pull_params(self.assumed_pull),
            "recompute": {
                "seconds_per_token": self.recompute.seconds_per_token,
                "seconds_per_token_and_context": self.recompute.seconds_per_token_and_context,
            }
            if self.recompute is not None
            else None,
            "probe_tokens": self.probe.tokens,
            "probe_min_tokens": self.probe.min_tokens,
            "probe_share": self.probe.share,
            "probe_seconds": self.probe.seconds,
            "probe_whole": self.probe.whole,
        }

    @classmethod
    def from_params(cls, value: object) -> Costs:
        """Read `to_params` back; what is missing or makes no sense is unknown."""
        if not isinstance(value, dict):
            return cls()
        recompute = _figures(
            value.get("recompute"), "seconds_per_token", "seconds_per_token_and_context"
        )
        unlimited = "probe_seconds" in value and value["probe_seconds"] is None
        return cls(
            pull=_pull_cost(value.get("pull")),
            assumed_pull=_pull_cost(value.get("assumed_pull")),
            recompute=RecomputeCost(*recompute) if recompute is not None else None,
            probe=Probe(
                tokens=int(_figure(value.get("probe_tokens")) or 0),
                min_tokens=int(_figure(value.get("probe_min_tokens")) or 0),
                share=_figure(value.get("probe_share")) or 0.0,
                seconds=None if unlimited else _figure(value.get("probe_seconds")) or 0.0,
                whole=value.get("probe_whole") is True,
            ),
        )


@dataclass(frozen=True)
class PullPlan:
    """The decision for one prompt."""

    tokens: int
    """Leading tokens of the prompt to offer for the pull: all that are proven, a
    probe, or 0. Never ends inside a block unless it is all."""
    expected_pull_seconds: float | None
    """What pulling all that is proven and not cached would take; None while the
    link is not measured."""
    expected_recompute_seconds: float | None
    """What computing the same tokens would take; None while the engine's speed is
    not measured."""
    reason: str
    """Why so many, in words."""
    held_back: bool = False
    """True if less than all is offered, because computing is faster or might be."""


def plan(
    costs: dict[str, Any] | None, *, proven: int, cached: int, prompt: int, block_size: int
) -> PullPlan:
    """Decide how much of a proven prefix to pull.

    Args:
        costs: `Costs.to_params` as it came with the handle; None for a sidecar
            that measures nothing: all is pulled.
        proven: leading tokens whose KV the decode engine surely holds.
        cached: leading tokens in the prefill engine's own prefix cache.
        prompt: tokens in the prompt.
        block_size: tokens per KV block.
    """
    known = Costs.from_params(costs)
    wanted = proven - cached
    if wanted <= 0:
        return PullPlan(proven, None, None, "nothing is left to pull")
    recompute = known.recompute.seconds(cached, proven) if known.recompute is not None else None
    measured = known.pull.seconds(wanted) if known.pull is not None else None
    if known.recompute is None or recompute is None:
        return PullPlan(proven, measured, None, "the engine's speed is not measured yet")
    cost = known.pull if known.pull is not None else known.assumed_pull
    if cost is None:
        return PullPlan(proven, None, recompute, "the link is not measured yet")
    if cost.seconds(wanted) <= recompute:
        how = "is" if measured is not None else "should be, even on a slow link,"
        return PullPlan(proven, measured, recompute, f"pulling {how} faster than computing")
    if known.probe.whole:
        probe = _whole_probe(known.probe, cost.seconds(wanted) - recompute, wanted, recompute)
    else:
        probe = _probe_tokens(known.probe, cost, known.recompute, cached, prompt, block_size)
    if probe <= 0:
        tokens, reason = 0, "computing is faster than pulling"
        if measured is None:
            reason = "the link is not measured yet, and the prompt is too short for a probe"
    elif measured is None:
        tokens, reason = cached + probe, "the link is not measured yet: a probe"
    else:
        tokens, reason = cached + probe, "computing is faster than pulling: a probe"
    return PullPlan(min(tokens, proven), measured, recompute, reason, held_back=tokens < proven)


def _whole_probe(probe: Probe, excess: float, wanted: int, recompute: float) -> int:
    """All that is wanted if that costs no more than it may, else 0."""
    if probe.tokens <= 0:
        return 0
    if probe.seconds is None or excess <= max(probe.share * recompute, probe.seconds):
        return wanted
    return 0


def _probe_tokens(
    probe: Probe,
    cost: PullCost,
    recompute: RecomputeCost,
    cached: int,
    prompt: int,
    block_size: int,
) -> int:
    """Tokens beyond `cached` for a probe that costs no more than it may; 0 for none."""
    if probe.tokens <= 0:
        return 0
    tokens: float = probe.tokens
    if probe.seconds is not None:
        # The probe saves some computing. What it saves at an empty context is
        # the least.
        allowed = max(probe.share * recompute.seconds(cached, prompt), probe.seconds)
        excess = cost.seconds_per_token - recompute.seconds_per_token
        if excess > 0:
            tokens = min(tokens, (allowed - cost.latency_seconds) / excess)
        elif cost.latency_seconds > allowed:
            return 0
    least = _aligned_up(cached + max(probe.min_tokens, 1), block_size) - cached
    if tokens < least:
        # Without a limit the engine's own threshold still has to be met.
        return least if probe.seconds is None else 0
    return (cached + int(tokens)) // block_size * block_size - cached


def _aligned_up(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size


def _pull_params(cost: PullCost | None) -> dict[str, float] | None:
    if cost is None:
        return None
    return {
        "latency_seconds": cost.latency_seconds,
        "seconds_per_token": cost.seconds_per_token,
    }


def _pull_cost(value: object) -> PullCost | None:
    figures = _figures(value, "latency_seconds", "seconds_per_token")
    return PullCost(*figures) if figures is not None else None


def _figures(value: object, first: str, second: str) -> tuple[float, float] | None:
    if not isinstance(value, dict):
        return None
    one, two = _figure(value.get(first)), _figure(value.get(second))
    return (one, two) if one is not None and two is not None else None


def _figure(value: object) -> float | None:
    """A finite number of at least 0; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None
