"""The scale benchmark counts what it says it counts."""

from __future__ import annotations

import pytest

from bench.scale import traffic
from bench.scale.decisions import measure
from bench.scale.engines import TTL_SECONDS, Conversation, Decode, Prefill, Prefilled
from bench.scale.timeline import Timeline
from bench.scale.workload import Workload, scripts
from bench.scale.world import Fleet, run
from services.router.policies import PolicyName
from services.sim.latency import PROFILES, Preset

PROFILE = PROFILES[Preset.QWEN3_32B_H200]
SMALL = Workload(seconds=30, turns_per_second=4)


def prefill(timeline: Timeline, cache_tokens: int = 100_000) -> Prefill:
    return Prefill(timeline, PROFILE, slowness=1.0, cache_tokens=cache_tokens)


def decode(timeline: Timeline, **fields) -> Decode:
    return Decode(timeline, PROFILE, **{"slots": 2, "retained_tokens": 100_000, **fields})


def test_the_same_seed_gives_the_same_conversations() -> None:
    assert list(scripts(SMALL, 1)) == list(scripts(SMALL, 1))
    assert list(scripts(SMALL, 1)) != list(scripts(SMALL, 2))


def test_retained_kv_is_pulled_once_and_then_cached() -> None:
    timeline = Timeline()
    done: list[Prefilled] = []
    engine, holder, talk = prefill(timeline), decode(timeline), Conversation(1, tokens=8000)
    holder.retain(talk)
    assert (talk.held, talk.expires) == (8000, TTL_SECONDS)
    for _ in range(2):
        engine.run(talk, 8500, done.append)
        timeline.run()
        assert talk.holder is None
    pulled, cached = done
    assert (pulled.pulled, pulled.cached, pulled.computed) == (8000, 0, 500)
    assert pulled.expected_pull < pulled.expected_recompute
    assert (cached.pulled, cached.cached, cached.computed) == (0, 8499, 1)


def test_prompts_are_computed_one_after_the_other() -> None:
    timeline = Timeline()
    engine = prefill(timeline)
    ends: list[float] = []

    def note(_: Prefilled) -> None:
        ends.append(timeline.now)

    for number in range(2):
        engine.run(Conversation(number), 10_000, note)
    timeline.run()
    seconds = PROFILE.step([(10_000, 0)], ())
    assert ends[1] - ends[0] == pytest.approx(seconds)
    assert engine.busy_seconds == pytest.approx(2 * seconds)


def test_decode_makes_turns_wait_for_a_slot() -> None:
    timeline = Timeline()
    engine = decode(timeline, slots=1)
    firsts: list[float] = []
    ends: list[float] = []
    for _ in range(2):
        engine.run(
            100,
            100,
            50,
            first=lambda: firsts.append(timeline.now),
            end=lambda: ends.append(timeline.now),
        )
    timeline.run()
    assert firsts[1] > ends[0]


def test_least_recently_committed_conversations_make_room() -> None:
    engine = decode(Timeline(), retained_tokens=10_000)
    talks = [Conversation(number, tokens=4000) for number in range(3)]
    for talk in talks:
        engine.retain(talk)
    assert [talk.held for talk in talks] == [0, 4000, 4000]


@pytest.mark.parametrize("policy", list(PolicyName))
async def test_every_turn_is_answered_under_every_policy(policy: PolicyName) -> None:
    fleet = Fleet(prefill=3, decode=4, routers=2, slow_share=0.3, stalled=1)
    outcome = await run(policy, fleet, SMALL, seed=1)
    turns = [turn for script in scripts(SMALL, 1) for turn in script.turns]
    assert len(outcome.ttft) == len(turns)
    assert 0 < outcome.hit_rate <= 1
    assert outcome.quantile(0.5) <= outcome.quantile(0.99)


async def test_traffic_is_linear_in_turns_and_workers() -> None:
    small, more_talk, more_workers = (
        await traffic.count(10, 100),
        await traffic.count(10, 1000),
        await traffic.count(20, 100),
    )
    assert small.turns.messages / small.turn_count == 4
    per_turn = [one.turns.bytes / one.turn_count for one in (small, more_talk, more_workers)]
    assert max(per_turn) < 1.02 * min(per_turn)
    assert more_talk.leases == small.leases
    assert more_workers.leases.messages == 2 * small.leases.messages
    assert more_workers.joining.messages < 2.1 * small.joining.messages
    per_pin = [one.pins.bytes / one.conversations for one in (small, more_talk)]
    assert max(per_pin) < 1.1 * min(per_pin)


async def test_decisions_are_timed() -> None:
    measured = await measure(PolicyName.EXPECTED_TTFT, 10, 50, seed=1)
    assert len(measured.seconds) == 50
    assert 0 < measured.quantile(0.5) <= measured.quantile(0.99) < 1
