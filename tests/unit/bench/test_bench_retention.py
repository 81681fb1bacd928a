"""The retention benchmark counts what it says it counts."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from bench.retention.arms import ARMS, FIXED
from bench.retention.charts import write_chart
from bench.retention.runs import Run, rows, run_all, write_csv
from bench.retention.workload import End, Script, Turn, Workload, scripts
from bench.retention.world import LEASE_SECONDS, READ_SECONDS, TTL_SECONDS, World

RELEASE, BUDGET, HORIZON = (arm for arm in ARMS if arm is not FIXED)
SMALL = Workload(hours=0.5, conversations_per_minute=6.0, mean_turns=5.0)


def script(*gaps: float, end: End = End.SAID, tokens: int = 1600) -> Script:
    """A conversation with those gaps; every turn takes 1 s and holds 100 blocks."""
    turns = tuple(Turn(gap, 1.0, tokens) for gap in (0.0, *gaps))
    return Script("c1", "agents", 10.0, turns, end)


def test_the_same_seed_gives_the_same_conversations() -> None:
    assert list(scripts(SMALL, 1)) == list(scripts(SMALL, 1))
    assert list(scripts(SMALL, 1)) != list(scripts(SMALL, 2))


def test_shares_of_endings_are_as_asked_for() -> None:
    many = list(scripts(replace(SMALL, hours=20, ends_said=0.5), 3))
    ends = [one.end for one in many]
    assert ends.count(End.ABANDONED) / len(many) == pytest.approx(0.1, abs=0.02)
    assert ends.count(End.SAID) / len(many) == pytest.approx(0.45, abs=0.03)


def test_a_fixed_ttl_keeps_until_the_read_and_then_for_all_of_itself() -> None:
    outcome = World(FIXED, 1000).run([script(20.0)])
    assert outcome.block_seconds == pytest.approx(100 * (20 + READ_SECONDS + TTL_SECONDS))
    assert (outcome.turns, outcome.hits, outcome.peak_blocks) == (1, 1, 100)


def test_leases_release_a_conversation_whose_end_is_said() -> None:
    outcome = World(RELEASE, 1000).run([script(20.0)])
    assert outcome.block_seconds == pytest.approx(100 * (20 + READ_SECONDS))
    assert outcome.hits == 1


def test_leases_are_renewed_over_a_long_pause() -> None:
    pause = 3 * LEASE_SECONDS
    outcome = World(RELEASE, 1000).run([script(pause)])
    assert outcome.hits == 1
    assert outcome.freed["read"] == pytest.approx(100 * (pause + READ_SECONDS))


def test_beyond_the_ttl_nothing_is_left_and_the_turn_misses() -> None:
    for arm in ARMS:
        outcome = World(arm, 1000).run([script(TTL_SECONDS + 60)])
        assert (outcome.turns, outcome.hits) == (1, 0)


def test_a_conversation_whose_end_nobody_says_falls_at_its_ttl() -> None:
    outcome = World(RELEASE, 1000).run([script(end=End.ABANDONED)])
    # The ledger wants it for the TTL; the next round of renewals sees that it is over.
    assert 0.98 < outcome.block_seconds / (100 * TTL_SECONDS) < 1.05


def test_beyond_the_budget_conversations_give_way() -> None:
    crowd = [replace(script(100.0), name=f"c{number}", start=10.0 + number) for number in range(20)]
    outcome = World(BUDGET, 1000).run(crowd)
    assert outcome.freed["budget"] > 0
    assert outcome.hits < 20


def test_rows_compare_with_the_fixed_ttl_of_the_same_seed(tmp_path: Path) -> None:
    runs = list(run_all(SMALL, [1.0], [1, 2], 100_000))
    found = {row.arm: row for row in rows(runs)}
    assert found["fixed"].fewer == 1.0
    assert found["release"].fewer > 1.5
    assert found["release"].points_lost == pytest.approx(0.0, abs=0.5)
    assert found["horizon"].fewer >= found["release"].fewer
    assert found["horizon"].fewer_least <= found["horizon"].fewer <= found["horizon"].fewer_most
    write_csv(tmp_path / "runs.csv", runs)
    with (tmp_path / "runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(runs) == 8
    write_chart(tmp_path / "runs.svg", runs)
    assert (tmp_path / "runs.svg").stat().st_size > 1000


def test_parts_of_block_seconds_add_up() -> None:
    runs: list[Run] = list(run_all(SMALL, [0.5], [1], 100_000))
    for run in runs:
        parts = run.read + run.expired + run.overdue + run.budget
        # What is released at the end of a conversation was kept for no time.
        assert parts == pytest.approx(run.block_seconds, rel=0.01)
