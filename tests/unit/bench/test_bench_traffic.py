"""Other requests beside the ones that are measured."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvloop.bench.traffic import Traffic, TrafficPlan, traffic
from kvloop.bench.turns import TurnRequest, TurnResult
from tests.unit.bench.fakes import FakeClock, FakeTurns, result


@pytest.mark.parametrize(
    ("windows", "gaps"),
    [
        ([(0.0, 100.0)], [0.25, 0.5]),
        ([(0.0, 11.3)], [0.25]),
        ([(11.3, 11.8)], [0.5]),
        ([(11.0, 11.3), (11.5, 12.0)], [0.25, 0.5]),
        ([(0.0, 11.0)], []),
        ([], []),
    ],
)
def test_only_gaps_within_the_windows_are_told(
    windows: list[tuple[float, float]], gaps: list[float]
) -> None:
    # First token at 11.0, then at 11.25 and at 11.75.
    seen = Traffic(answers=[(10.0, result(ttft=1.0, gaps=(0.25, 0.5)))])
    assert seen.gaps_during(windows) == gaps


class _SlowTurns(FakeTurns):
    """Lets others run during a turn; counts what runs at once."""

    running = 0
    most = 0

    async def run(self, request: TurnRequest) -> TurnResult:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            return await super().run(request)
        finally:
            self.running -= 1


async def test_requests_keep_running_until_the_block_ends() -> None:
    turns = _SlowTurns()
    plan = TrafficPlan(requests=3, prompt_tokens=20, answer_tokens=4)
    async with traffic(turns, plan, name="t", source=random.Random(1), clock=FakeClock()) as seen:
        while len(seen.answers) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert turns.most == 3
    assert turns.running == 0
    assert not any(request.reuse for request in turns.requests)
    assert len({request.conversation for request in turns.requests}) == len(turns.requests)
    assert {len(request.prompt) for request in turns.requests} == {20}


async def test_requests_that_fail_are_counted() -> None:
    turns = _SlowTurns(failing="t-0")
    plan = TrafficPlan(requests=2, prompt_tokens=20, answer_tokens=4)
    async with traffic(turns, plan, name="t", source=random.Random(1), clock=FakeClock()) as seen:
        while not (seen.failures and seen.answers):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert seen.failures >= 1
