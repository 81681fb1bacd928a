"""How much of a proven prefix is pulled."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from services.worker.pull_plan import Costs, Probe, PullCost, PullPlan, RecomputeCost, plan

GOOD = PullCost(latency_seconds=0.002, seconds_per_token=2e-6)
BAD = PullCost(latency_seconds=0.005, seconds_per_token=5e-4)  # 0.3 GB/s at 150 KB a token
ENGINE = RecomputeCost(seconds_per_token=3e-5, seconds_per_token_and_context=1e-9)
PROBE = Probe(tokens=512, min_tokens=64, share=0.05, seconds=0.0)


def decide(
    costs: Costs | dict[str, Any] | None,
    *,
    proven: int = 8000,
    cached: int = 0,
    prompt: int = 8100,
    block_size: int = 16,
) -> PullPlan:
    params = costs.to_params() if isinstance(costs, Costs) else costs
    travelled = json.loads(json.dumps(params))
    return plan(travelled, proven=proven, cached=cached, prompt=prompt, block_size=block_size)


def excess(decided: PullPlan, cost: PullCost, cached: int = 0) -> float:
    """By how much the plan lengthens the turn against computing everything."""
    pulled = decided.tokens - cached
    return cost.seconds(pulled) - ENGINE.seconds(cached, decided.tokens)


def test_a_fast_link_pulls_all_that_is_proven() -> None:
    decided = decide(Costs(pull=GOOD, recompute=ENGINE))
    assert decided.tokens == 8000
    assert not decided.held_back
    assert decided.expected_pull_seconds == pytest.approx(0.018)
    assert decided.expected_recompute_seconds == pytest.approx(0.24 + 0.032)


def test_a_slow_link_pulls_nothing() -> None:
    decided = decide(Costs(pull=BAD, recompute=ENGINE))
    assert decided.tokens == 0
    assert decided.held_back
    assert decided.reason == "computing is faster than pulling"
    assert decided.expected_pull_seconds == pytest.approx(4.005)


@pytest.mark.parametrize("costs", [None, {}, {"pull": None, "recompute": None}, {"pull": 3}])
def test_without_figures_all_is_pulled(costs: dict[str, Any] | None) -> None:
    decided = decide(costs)
    assert (decided.tokens, decided.held_back) == (8000, False)
    assert decided.expected_pull_seconds is None
    assert decided.expected_recompute_seconds is None


def test_an_unmeasured_engine_pulls_all_even_on_a_slow_link() -> None:
    assert decide(Costs(pull=BAD)).tokens == 8000


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), True, "0.1", None])
def test_figures_that_make_no_sense_are_unknown(bad: object) -> None:
    params = Costs(pull=BAD, recompute=ENGINE).to_params()
    params["pull"]["seconds_per_token"] = bad
    assert Costs.from_params(params).pull is None


def test_costs_survive_their_journey() -> None:
    costs = Costs(GOOD, BAD, ENGINE, replace(PROBE, seconds=None, whole=True))
    assert Costs.from_params(json.loads(json.dumps(costs.to_params()))) == costs


def test_only_what_is_not_cached_is_compared() -> None:
    """The end of a long context is dear to compute, so a pull of it pays sooner."""
    link = PullCost(latency_seconds=0.0, seconds_per_token=5e-5)
    start = decide(Costs(pull=link, recompute=ENGINE), proven=10_000, cached=0, prompt=40_000)
    end = decide(Costs(pull=link, recompute=ENGINE), proven=40_000, cached=30_000, prompt=40_000)
    assert start.tokens == 0
    assert end.tokens == 40_000


def test_a_cached_prefix_leaves_nothing_to_decide() -> None:
    decided = decide(Costs(pull=BAD, recompute=ENGINE), cached=8000)
    assert (decided.tokens, decided.held_back) == (8000, False)


def test_no_part_of_a_pull_beats_both_all_and_nothing() -> None:
    """Savings are convex and the pull is linear."""
    for link in (GOOD, BAD, PullCost(0.01, 6e-5), PullCost(0.1, 4e-5)):
        for proven in (500, 5000, 50_000):
            totals = [
                link.seconds(part) + ENGINE.seconds(part, proven)
                for part in range(0, proven + 1, proven // 50)
            ]
            assert min(totals) == pytest.approx(min(totals[0], totals[-1]))


class TestProbes:
    def test_a_due_probe_costs_at_most_its_share_of_the_turn(self) -> None:
        decided = decide(Costs(pull=BAD, recompute=ENGINE, probe=Probe(512, 0, 0.05)))
        assert 0 < decided.tokens <= 512
        assert decided.held_back
        assert excess(decided, BAD) <= 0.05 * ENGINE.seconds(0, 8100)

    def test_a_probe_ends_with_a_block(self) -> None:
        decided = decide(
            Costs(pull=BAD, recompute=ENGINE, probe=Probe(512, 64, 1.0)), cached=4000, block_size=32
        )
        assert decided.tokens == 4288
        assert decided.tokens % 32 == 0

    def test_a_probe_that_would_cost_too_much_waits_for_a_longer_prompt(self) -> None:
        costs = Costs(pull=BAD, recompute=ENGINE, probe=PROBE)
        assert decide(costs, proven=2000, prompt=2100).tokens == 0
        assert decide(costs, proven=60_000, prompt=60_100).tokens > 0

    def test_an_overdue_probe_may_cost_anything_but_stays_small(self) -> None:
        costs = Costs(
            pull=PullCost(5.0, 1e-3), recompute=ENGINE, probe=replace(PROBE, seconds=None)
        )
        assert decide(costs, proven=2000, prompt=2100).tokens == 512

    def test_a_probe_is_never_below_what_the_engine_pulls_at_all(self) -> None:
        costs = Costs(
            pull=BAD, recompute=ENGINE, probe=Probe(16, min_tokens=100, share=0.0, seconds=None)
        )
        assert decide(costs).tokens == 112

    def test_a_probe_never_goes_beyond_what_is_proven(self) -> None:
        costs = Costs(pull=BAD, recompute=ENGINE, probe=replace(PROBE, seconds=None))
        assert decide(costs, proven=100, prompt=8000).tokens == 100

    def test_latency_alone_can_make_a_probe_too_dear(self) -> None:
        costs = Costs(pull=PullCost(3.0, 1e-6), recompute=ENGINE, probe=PROBE)
        assert decide(costs).tokens == 0

    @pytest.mark.parametrize(("seconds", "tokens"), [(0.0, 0), (None, 8000)])
    def test_an_engine_that_cannot_cut_probes_with_all_or_nothing(
        self, seconds: float | None, tokens: int
    ) -> None:
        probe = replace(PROBE, seconds=seconds, whole=True)
        assert decide(Costs(pull=BAD, recompute=ENGINE, probe=probe)).tokens == tokens


class TestFirstContact:
    def test_pulls_all_if_even_a_slow_link_would_pay(self) -> None:
        slow_engine = RecomputeCost(1e-3, 0.0)
        decided = decide(Costs(assumed_pull=BAD, recompute=slow_engine, probe=PROBE))
        assert decided.tokens == 8000
        assert decided.expected_pull_seconds is None

    def test_is_a_probe_if_a_slow_link_would_not_pay(self) -> None:
        probe = Probe(tokens=512, min_tokens=64, share=0.5, seconds=0.1)
        decided = decide(Costs(assumed_pull=BAD, recompute=ENGINE, probe=probe))
        assert 64 <= decided.tokens <= 512
        assert excess(decided, BAD) <= 0.5 * ENGINE.seconds(0, 8100)

    def test_pulls_all_if_the_size_of_the_kv_is_unknown(self) -> None:
        assert decide(Costs(recompute=ENGINE, probe=PROBE)).tokens == 8000
