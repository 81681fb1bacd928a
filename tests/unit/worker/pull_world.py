"""A prefill engine and its links, as far as the time of legs goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.worker.event_messages import EngineRef
from services.worker.handoff import PrefillReport
from services.worker.metrics import WorkerMetrics
from services.worker.pull_costs import GuardLimits, PullCosts
from services.worker.pull_plan import PullCost, RecomputeCost, plan
from tests.unit.worker.fakes import FakeClock, hello

GOOD = PullCost(latency_seconds=0.002, seconds_per_token=2.5e-6)  # 60 GB/s at 150 KB a token
BAD = PullCost(latency_seconds=0.005, seconds_per_token=5e-4)  # 0.3 GB/s
SPEED = RecomputeCost(seconds_per_token=3e-5, seconds_per_token_and_context=1e-9)
LIMITS = GuardLimits(
    enabled=True,
    probe_tokens=512,
    probe_turns=16,
    probe_seconds=30.0,
    probe_overdue_seconds=300.0,
)
DECODE = EngineRef("decode-1", "epoch-1")


@dataclass
class Turn:
    """One leg as it went."""

    offered: int
    seconds: float
    alone: float
    """What the same leg takes without reuse."""

    @property
    def slowdown(self) -> float:
        """1.0: as long as without reuse."""
        return self.seconds / self.alone


class PullWorld:
    """Runs legs one after the other; plays the engine and its connector."""

    def __init__(
        self,
        *,
        limits: GuardLimits = LIMITS,
        link: PullCost = GOOD,
        kv_block_bytes: int = 16 * 150_000,
        noise: Callable[[], float] = lambda: 0.0,
        hybrid: bool = False,
        handshake_seconds: float = 0.0,
    ) -> None:
        self.clock = FakeClock()
        self.metrics = WorkerMetrics()
        self.link = link
        self.noise = noise
        self.handshake_seconds = handshake_seconds
        self._greeted: set[EngineRef] = set()
        self.overhead_seconds = 0.01
        self.gap_seconds = 1.0
        self.hello = msgspec.structs.replace(
            hello(),
            block_size=16,
            kv_block_bytes=kv_block_bytes,
            kv_recompute_threshold=64,
            hybrid_kv_cache=hybrid,
        )
        self.costs = PullCosts(lambda: self.hello, self.clock, self.metrics, limits)

    def first_turn(self, tokens: int = 8000) -> Turn:
        """A leg without a handle."""
        with self.costs.leg(None) as leg:
            seconds = self.overhead_seconds + SPEED.seconds(0, tokens) + self.noise()
            self.clock.now += seconds
            leg.report = PrefillReport(prompt_tokens=tokens, recomputed_tokens=tokens)
        self.clock.now += self.gap_seconds
        return Turn(0, seconds, seconds)

    def turn(
        self,
        proven: int = 8000,
        cached: int = 0,
        engine: EngineRef = DECODE,
        *,
        fails: bool = False,
    ) -> Turn:
        """A leg with a handle; the prompt is 100 tokens longer than what is proven."""
        prompt = proven + 100
        with self.costs.leg(engine) as leg:
            params = json.loads(json.dumps(leg.costs.to_params())) if leg.costs else None
            decided = plan(params, proven=proven, cached=cached, prompt=prompt, block_size=16)
            offered = decided.tokens if decided.tokens - cached >= 64 else cached
            pull = None
            if offered > cached:
                pull = self.link.seconds(offered - cached) + self.noise()
                if engine not in self._greeted:
                    self._greeted.add(engine)
                    pull += self.handshake_seconds
            start = cached if fails else offered
            seconds = self.overhead_seconds + SPEED.seconds(start, prompt) + (pull or 0.0)
            self.clock.now += seconds
            leg.report = PrefillReport(
                prompt_tokens=prompt,
                proven_tokens=proven,
                pulled_tokens=start - cached,
                cached_tokens=cached,
                recomputed_tokens=prompt - start,
                miss_reason="PULL_FAILED"
                if fails
                else "SLOWER_THAN_RECOMPUTE"
                if decided.held_back and offered == cached
                else None,
                pull_seconds=None if fails else pull,
                expected_pull_seconds=decided.expected_pull_seconds,
                expected_recompute_seconds=decided.expected_recompute_seconds,
            )
        self.clock.now += self.gap_seconds
        alone = self.overhead_seconds + SPEED.seconds(cached, prompt)
        return Turn(offered - cached, seconds, alone)

    def restart(self) -> None:
        """A new life of the prefill engine."""
        self.hello = msgspec.structs.replace(self.hello, epoch="epoch-2")

    def held_back(self) -> bool:
        """Whether the link to the one decode engine is held back."""
        return any(link.held_back for link in self.costs.links())
