"""The guard against pulls that are slower than recomputing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import structlog

from services.worker.event_messages import EngineRef
from services.worker.metrics import WorkerMetrics
from tests.unit.worker.pull_world import BAD, DECODE, GOOD, LIMITS, PullWorld


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"kvloop_worker_{name}", labels) or 0.0


def settled(world: PullWorld) -> PullWorld:
    """A world in which the engine and a good link are known."""
    world.first_turn()
    for _ in range(5):
        world.turn()
    assert world.turn().offered == 8000
    return world


def test_a_good_link_is_used_from_the_second_turn_on() -> None:
    world = PullWorld()
    world.first_turn()
    first = world.turn()
    assert 0 < first.offered < 8000  # a look at the link
    assert first.slowdown < 1.05
    assert [world.turn().offered for _ in range(20)] == [8000] * 20


def test_without_the_size_of_the_kv_the_first_turn_pulls_all() -> None:
    world = PullWorld(kv_block_bytes=0)
    world.first_turn()
    assert world.turn().offered == 8000


def test_on_a_bad_link_every_turn_is_nearly_as_fast_as_without_reuse_after_two() -> None:
    world = PullWorld(link=BAD)
    world.first_turn()
    contacts = [world.turn() for _ in range(2)]
    assert max(turn.slowdown for turn in contacts) < 1.6
    assert max(world.turn().slowdown for _ in range(200)) < 1.1
    assert world.held_back()


def test_without_the_size_of_the_kv_a_bad_link_is_found_out_in_two_pulls() -> None:
    world = PullWorld(link=BAD, kv_block_bytes=0)
    world.first_turn()
    assert [world.turn().offered for _ in range(2)] == [8000, 8000]
    assert max(world.turn().slowdown for _ in range(200)) < 1.1


def test_a_link_that_turns_bad_is_held_back_after_three_turns() -> None:
    world = settled(PullWorld())
    world.link = BAD
    for _ in range(3):
        world.turn()
    assert max(world.turn().slowdown for _ in range(200)) < 1.1
    assert world.held_back()


def test_a_link_that_recovers_is_used_again() -> None:
    world = settled(PullWorld())
    world.link = BAD
    for _ in range(10):
        world.turn()
    world.link = GOOD
    turns = [world.turn(proven=16_000).offered for _ in range(LIMITS.probe_turns + 4)]
    assert turns[-1] == 16_000
    assert not world.held_back()
    assert value(world.metrics, "links_held_back") == 0


def test_a_recovery_is_seen_by_time_where_turns_are_rare() -> None:
    world = settled(PullWorld())
    world.link = BAD
    for _ in range(10):
        world.turn()
    world.link, world.gap_seconds = GOOD, LIMITS.probe_seconds
    assert [world.turn(proven=16_000).offered for _ in range(3)][-1] == 16_000


def test_prompts_too_short_for_a_cheap_probe_still_see_a_recovery_in_the_end() -> None:
    world = settled(PullWorld())
    world.link = BAD
    for _ in range(10):
        world.turn()
    world.link = GOOD
    short = [world.turn(proven=1000).offered for _ in range(100)]
    assert 1000 not in short
    world.clock.now += LIMITS.probe_overdue_seconds
    assert [world.turn(proven=1000).offered for _ in range(3)][-1] == 1000


@pytest.mark.parametrize("seed", range(3))
def test_a_good_link_is_never_held_back_by_noise(seed: int) -> None:
    rng = random.Random(seed)
    world = settled(PullWorld())
    world.noise = lambda: rng.uniform(0.3, 3.0) if rng.random() < 0.15 else rng.random() * 0.02
    for _ in range(500):
        size = rng.choice([3000, 8000, 20_000])
        assert world.turn(proven=size).offered == size
        if rng.random() < 0.2:
            world.first_turn(size)


def test_a_link_in_between_is_used_where_it_pays() -> None:
    """2.3 GB/s: slower than computing 8k tokens, faster at the end of 100k."""
    world = PullWorld(link=replace(BAD, seconds_per_token=6.5e-5))
    for size in (2000, 8000, 32_000, 100_000):
        world.first_turn(size)
    for _ in range(10):
        world.turn()
    late = [world.turn(proven=100_000, cached=60_000).offered for _ in range(10)]
    early = [world.turn().slowdown for _ in range(50)]
    assert late[-1] == 40_000
    assert max(early) < 1.1


def test_pulls_that_always_fail_slowly_are_held_back() -> None:
    world = settled(PullWorld())
    world.link = replace(BAD, latency_seconds=5.0)
    for _ in range(3):
        world.turn(fails=True)
    assert max(world.turn(fails=True).slowdown for _ in range(50)) < 1.1


def test_an_engine_that_cannot_cut_pulls_all_or_nothing() -> None:
    world = PullWorld(link=BAD, hybrid=True)
    world.first_turn()
    offered = [world.turn().offered for _ in range(50)]
    assert set(offered) == {0, 8000}
    assert offered[2:] == [0] * 48
    world.link = GOOD
    world.clock.now += LIMITS.probe_overdue_seconds
    assert [world.turn().offered for _ in range(3)] == [8000] * 3


def test_one_probe_at_a_time_looks_at_a_link() -> None:
    world = PullWorld(link=BAD)
    world.first_turn()
    with world.costs.leg(DECODE) as first, world.costs.leg(DECODE) as second:
        assert first.costs is not None
        assert second.costs is not None
        assert first.costs.probe.tokens > 0
        assert second.costs.probe.tokens == 0
    with world.costs.leg(DECODE) as third:
        assert third.costs is not None
        assert third.costs.probe.tokens > 0


def test_switched_off_the_guard_holds_nothing_back_but_still_measures() -> None:
    world = PullWorld(link=BAD, limits=replace(LIMITS, enabled=False))
    world.first_turn()
    assert [world.turn().offered for _ in range(20)] == [8000] * 20
    assert world.held_back()
    assert world.costs.plan(DECODE, 8000).tokens == 8000
    assert "switched off" in world.costs.plan(DECODE, 8000).reason


def test_a_slow_link_is_reported_once_and_says_what_to_set() -> None:
    world = PullWorld(link=BAD)
    world.first_turn()
    with structlog.testing.capture_logs() as logs:
        for _ in range(50):
            world.turn(proven=16_000)
    found = [entry for entry in logs if entry["event"] == "link_slower_than_recompute"]
    assert len(found) == 1
    assert found[0]["log_level"] == "error"
    assert found[0]["engine"] == DECODE.engine_id
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY" in found[0]["hint"]
    assert value(world.metrics, "links_held_back") == 1
    assert value(world.metrics, "pulls_held_back_total", offered="none") > 40
    assert value(world.metrics, "pulls_held_back_total", offered="probe") >= 2
    assert value(world.metrics, "pull_seconds_lost_total") > 0


def test_a_plan_says_what_a_pull_would_take_and_changes_nothing() -> None:
    world = settled(PullWorld())
    for _ in range(3):
        decided = world.costs.plan(DECODE, 8000)
    assert decided.tokens == 8000
    assert decided.expected_pull_seconds == pytest.approx(GOOD.seconds(8000), rel=0.3)
    assert decided.expected_recompute_seconds == pytest.approx(0.28, rel=0.1)
    unknown = world.costs.plan(EngineRef("other", "life"), 8000)
    assert unknown.expected_pull_seconds is None
    assert [link.engine for link in world.costs.links()] == [DECODE]


def test_links_are_shown_with_their_rate() -> None:
    world = settled(PullWorld())
    (link,) = world.costs.links()
    assert link.samples > 2
    assert link.bytes_per_second == pytest.approx(8000 * 150_000 / GOOD.seconds(8000), rel=0.05)


def test_estimates_of_engines_long_gone_make_room() -> None:
    world = PullWorld()
    world.first_turn()
    for number in range(600):
        world.turn(engine=EngineRef(f"decode-{number}", "life"))
    assert len(world.costs.links()) == 256
    assert world.costs.links()[-1].engine.engine_id == "decode-599"


def test_a_restarted_prefill_engine_is_measured_anew() -> None:
    world = settled(PullWorld())
    world.restart()
    world.turn()
    assert [link.samples for link in world.costs.links()] == [1]


def test_a_leg_that_fails_teaches_nothing() -> None:
    world = PullWorld()
    with pytest.raises(RuntimeError), world.costs.leg(DECODE):
        raise RuntimeError
    assert world.costs.links() == []
    assert world.costs.recompute is None


@pytest.mark.parametrize("handshake_seconds", [0.03, 0.07, 0.5, 2.0])
def test_a_handshake_is_not_taken_for_a_slow_link(handshake_seconds: float) -> None:
    # Seen on an H200: the first pull of 224 tokens took 70 ms, the next ones 2 ms.
    world = PullWorld(handshake_seconds=handshake_seconds)
    world.first_turn()
    offered = [world.turn().offered for _ in range(4)]
    assert offered[2:] == [8000, 8000]
    assert value(world.metrics, "links_held_back") == 0
