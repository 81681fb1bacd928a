"""A pull is never slower than recomputing for long: sidecar's guard over simulated engines.

Time is virtual and the latencies are those of Qwen3-32B on an H200, so durations
are exact.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio

from services.sim.core import EngineCore
from services.sim.events import hello
from services.sim.faults import Fault, FaultKind
from services.sim.latency import PROFILES, Preset
from services.sim.link import Link
from services.worker.engine import Api, Engine
from services.worker.event_messages import EngineRef, Hello
from services.worker.handoff import PrefillReport
from services.worker.metrics import WorkerMetrics
from services.worker.prefill import PrefillLeg, PrefillOrder
from services.worker.prefill_body import read_prefill_body
from services.worker.pull_costs import GuardLimits, PullCosts
from tests.unit.sim.lab import Lab, open_lab, prompt_of

SLOW = Link(bytes_per_second=0.3e9)
PROFILE_LINK = Link()
TURN_TOKENS = 12_000
SETUP: dict[str, Any] = {
    "profile": PROFILES[Preset.QWEN3_32B_H200],
    "block_size": 128,
    "num_blocks": 1000,
    "max_model_len": 100_000,
    "max_num_batched_tokens": 8192,
}
LIMITS = GuardLimits(
    enabled=True,
    probe_tokens=512,
    probe_turns=16,
    probe_seconds=30.0,
    probe_overdue_seconds=300.0,
)


@dataclass
class Leg:
    """One prefill leg as it went."""

    report: PrefillReport
    seconds: float

    @property
    def pulled(self) -> int:
        return self.report.pulled_tokens


class _LabEngine:
    """The part of the Engine port that a prefill leg needs, over an engine core."""

    def __init__(self, lab: Lab, core: EngineCore) -> None:
        self._lab = lab
        self._core = core
        self.faults: Sequence[Fault] = ()

    async def complete(self, api: Api, body: bytes) -> bytes:
        members = json.loads(body)
        answer = await self._lab.ask(
            self._core,
            members["prompt"],
            max_tokens=1,
            params=members["kv_transfer_params"],
            faults=self.faults,
        )
        return json.dumps({"kv_transfer_params": answer.handed_over}).encode()


class World:
    """One prefill worker, one decode engine, and a conversation that grows."""

    def __init__(self, lab: Lab, limits: GuardLimits = LIMITS) -> None:
        self.lab = lab
        self.link = Link()
        self.prefill = lab.engine(link=self.link, **SETUP)
        self.decode = lab.engine(**SETUP)
        self.engine = _LabEngine(lab, self.prefill)
        self.metrics = WorkerMetrics()
        said = msgspec.convert(
            {**hello(self.prefill.spec, self.prefill.identity), "type": "hello"}, Hello
        )
        self.costs = PullCosts(lambda: said, lab.clock, self.metrics, limits)
        self.leg = PrefillLeg(cast(Engine, self.engine), self.costs, self.metrics)
        self.turns = 0

    def set_link(self, link: Link) -> None:
        self.link.bytes_per_second = link.bytes_per_second

    async def turn(self, tokens: int = TURN_TOKENS) -> Leg:
        """A second turn: decode holds most of the prompt, prefill's cache is cold."""
        self.turns += 1
        prompt = prompt_of(tokens, seed=self.turns)
        held = prompt[: tokens - 500]
        first = {"do_remote_decode": False, "do_remote_prefill": False}
        answer = await self.lab.ask(
            self.decode,
            held,
            max_tokens=1,
            params=first | {"kvloop_turn_id": f"turn-{self.turns}"},
        )
        return await self._leg(prompt, json.dumps(answer.handed_over).encode())

    async def first_turn(self, tokens: int = TURN_TOKENS) -> Leg:
        """A turn without a handle: what recomputing takes."""
        self.turns += 1
        return await self._leg(prompt_of(tokens, seed=self.turns), b"")

    async def _leg(self, prompt: list[int], handle: bytes) -> Leg:
        self.prefill.reset_prefix_cache()
        started = self.lab.clock.monotonic()
        ref = EngineRef(self.decode.identity.engine_id, self.decode.identity.epoch)
        result = await self.leg.run(
            PrefillOrder(
                f"turn-{self.turns}",
                Api.COMPLETIONS,
                read_prefill_body(Api.COMPLETIONS, json.dumps({"prompt": prompt}).encode()),
                handle,
                ref if handle else None,
            )
        )
        seconds = self.lab.clock.monotonic() - started
        self.prefill.release([json.loads(result.params)["remote_request_id"]])
        await self.lab.clock.advance(1.0)
        return Leg(result.report, seconds)


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    async with open_lab() as lab:
        yield World(lab)


async def test_a_good_link_makes_turns_many_times_faster(world: World) -> None:
    recompute = await world.first_turn()
    await world.turn()  # a look at the link
    turns = [await world.turn() for _ in range(5)]
    assert [leg.pulled for leg in turns] == [TURN_TOKENS - 500] * 5
    assert max(leg.seconds for leg in turns) < recompute.seconds / 5
    report = turns[-1].report
    assert report.pull_seconds is not None
    assert report.expected_pull_seconds == pytest.approx(report.pull_seconds, rel=0.3)
    assert report.expected_recompute_seconds == pytest.approx(recompute.seconds, rel=0.15)


async def test_at_a_third_of_a_gigabyte_turns_cost_at_most_a_tenth_more_after_three(
    world: World,
) -> None:
    world.set_link(SLOW)
    recompute = await world.first_turn()
    await world.turn()
    await world.turn()
    turns = [await world.turn() for _ in range(40)]
    assert max(leg.seconds for leg in turns) < 1.1 * recompute.seconds
    assert {leg.report.miss_reason for leg in turns} == {"SLOWER_THAN_RECOMPUTE", None}


async def test_a_link_that_turns_slow_costs_three_turns_and_is_used_again_when_it_recovers(
    world: World,
) -> None:
    recompute = await world.first_turn()
    for _ in range(5):
        await world.turn()
    world.set_link(SLOW)
    for _ in range(3):
        assert (await world.turn()).seconds > 2 * recompute.seconds
    held_back = [await world.turn() for _ in range(20)]
    assert max(leg.seconds for leg in held_back) < 1.1 * recompute.seconds
    assert any(link.held_back for link in world.costs.links())

    world.set_link(PROFILE_LINK)
    recovering = [await world.turn() for _ in range(LIMITS.probe_turns + 2)]
    assert recovering[-1].pulled == TURN_TOKENS - 500
    assert max(leg.seconds for leg in recovering) < 1.1 * recompute.seconds
    assert not any(link.held_back for link in world.costs.links())


@pytest.mark.parametrize("seed", range(2))
async def test_a_good_link_is_never_held_back_by_transfers_that_are_slow_by_chance(
    world: World, seed: int
) -> None:
    rng = random.Random(seed)
    await world.first_turn()
    await world.turn()
    for _ in range(60):
        world.engine.faults = ()
        if rng.random() < 0.15:
            seconds = rng.uniform(0.5, 5.0)
            world.engine.faults = [Fault(FaultKind.SLOW_TRANSFER, seconds=seconds)]
        assert (await world.turn()).pulled == TURN_TOKENS - 500


async def test_without_the_guard_a_slow_link_makes_every_turn_slower() -> None:
    async with open_lab() as lab:
        world = World(lab, replace(LIMITS, enabled=False))
        world.set_link(SLOW)
        recompute = await world.first_turn()
        turns = [await world.turn() for _ in range(5)]
        assert min(leg.seconds for leg in turns) > 4 * recompute.seconds
