"""Runs of every arm over the same scripts, and what they come to."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from bench.retention.arms import ARMS, FIXED
from bench.retention.workload import Workload, scripts
from bench.retention.world import World


@dataclass(frozen=True)
class Run:
    """One arm over one set of scripts."""

    ends_said: float
    arm: str
    seed: int
    turns: int
    hit_rate: float
    block_seconds: float
    read: float
    """Block-seconds of what was read by the next turn."""
    expired: float
    """Of what fell at its TTL."""
    overdue: float
    """Of what was given up beyond the horizon."""
    budget: float
    """Of what gave way to others."""
    peak_blocks: int


@dataclass(frozen=True)
class Row:
    """One arm over all seeds, against the fixed TTL with the same seeds."""

    ends_said: float
    arm: str
    fewer: float
    """Fixed TTL's block-seconds over this arm's, mean of the seeds."""
    fewer_least: float
    fewer_most: float
    hit_rate: float
    points_lost: float
    """Of the hit rate, mean of the seeds."""
    points_lost_most: float
    peak_share: float
    """Most blocks retained, as a share of fixed TTL's."""


def run_all(
    workload: Workload, shares: Sequence[float], seeds: Sequence[int], num_blocks: int
) -> Iterator[Run]:
    """Every arm over every seed, for each share of conversations whose end is said."""
    for share in shares:
        for seed in seeds:
            played = list(scripts(replace(workload, ends_said=share), seed))
            for arm in ARMS:
                outcome = World(arm, num_blocks).run(played)
                freed = outcome.freed
                yield Run(
                    ends_said=share,
                    arm=arm.name,
                    seed=seed,
                    turns=outcome.turns,
                    hit_rate=outcome.hit_rate,
                    block_seconds=outcome.block_seconds,
                    read=freed.get("read", 0.0),
                    expired=freed.get("expired", 0.0),
                    overdue=freed.get("overdue", 0.0),
                    budget=freed.get("budget", 0.0),
                    peak_blocks=outcome.peak_blocks,
                )


def rows(runs: Iterable[Run]) -> list[Row]:
    """The runs, seeds taken together."""
    by_case: dict[tuple[float, str], dict[int, Run]] = {}
    for run in runs:
        by_case.setdefault((run.ends_said, run.arm), {})[run.seed] = run
    return [
        _row(share, arm, found, by_case[share, FIXED.name])
        for (share, arm), found in by_case.items()
    ]


def _row(share: float, arm: str, found: dict[int, Run], fixed: dict[int, Run]) -> Row:
    fewer = [fixed[seed].block_seconds / run.block_seconds for seed, run in found.items()]
    lost = [100 * (fixed[seed].hit_rate - run.hit_rate) for seed, run in found.items()]
    peaks = [run.peak_blocks / fixed[seed].peak_blocks for seed, run in found.items()]
    return Row(
        ends_said=share,
        arm=arm,
        fewer=mean(fewer),
        fewer_least=min(fewer),
        fewer_most=max(fewer),
        hit_rate=mean(run.hit_rate for run in found.values()),
        points_lost=mean(lost),
        points_lost_most=max(lost),
        peak_share=mean(peaks),
    )


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """One line per run."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(runs[0])))
        writer.writeheader()
        writer.writerows(asdict(run) for run in runs)
