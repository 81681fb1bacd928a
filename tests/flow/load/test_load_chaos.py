"""Conversations under attack, as `python -m bench.soak chaos` runs them, in short."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.soak.chaos import Attack, Crowd
from bench.soak.runs import Surroundings, run_chaos
from bench.soak.stack import Shape
from bench.soak.talks import Lengths
from tests.flow.load.soaks import explained


@pytest.mark.timeout(600)  # eleven processes have to start on a machine that may be busy
@pytest.mark.usefixtures("turn_to_soak")
async def test_killed_processes_cost_no_answer_and_leave_nothing_behind(tmp_path: Path) -> None:
    crowd = Crowd(
        conversations=12,
        seconds=8.0,
        pause_seconds=0.5,
        turn_seconds=90.0,
        patience_seconds=120.0,
        # Answers above the threshold: each is worth a pull.
        lengths=Lengths((60, 120), answer=80, turns=6),
    )
    around = Surroundings(tmp_path, tmp_path, 7, time.monotonic, lambda _: None)
    shape = Shape(routers=2, inter_token_seconds=0.0075, ttl_seconds=7.5, pin_lease_seconds=7.5)

    report = await run_chaos(crowd, Attack(2.5, settle_seconds=20.0), shape, around)

    assert report.passed, explained(report, tmp_path)
    assert sum(report.kills.values()) >= 2
    assert report.tally.hits > 0
