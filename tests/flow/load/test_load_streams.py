"""Many streams at once, as `python -m bench.soak streams` runs them, in short."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.soak.runs import Surroundings, run_streams
from bench.soak.stack import Shape
from bench.soak.streams import Load
from bench.soak.talks import Lengths
from tests.flow.load.soaks import explained


@pytest.mark.timeout(600)  # ten processes have to start on a machine that may be busy
@pytest.mark.usefixtures("turn_to_soak")
async def test_streams_with_faults_are_right_and_leave_nothing_behind(tmp_path: Path) -> None:
    load = Load(
        streams=45,
        seconds=6.0,
        ramp_seconds=1.0,
        pause_seconds=0.2,
        turn_seconds=90.0,
        lengths=Lengths((60, 120), answer=12, turns=4),
    )
    around = Surroundings(tmp_path, tmp_path, 7, time.monotonic, lambda _: None)

    report = await run_streams(
        load, 0.1, Shape(inter_token_seconds=0.05, ttl_seconds=7.5, pin_lease_seconds=7.5), around
    )

    assert report.passed, explained(report, tmp_path)
    assert report.tally.injected.total() > 0
    assert report.tally.hits > 0
