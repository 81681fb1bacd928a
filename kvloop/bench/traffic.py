"""Other people's requests, running while conversations are measured."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvloop.bench.turns import TurnRequest, TurnResult, TurnRunner
from kvloop.errors import KvloopError


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """How much other traffic there is.

    Attributes:
        requests: requests that run at once.
        prompt_tokens: tokens of each prompt, all different.
        answer_tokens: tokens of each answer.
        vocabulary: tokens are drawn from 10 up to this.
    """

    requests: int
    prompt_tokens: int = 1000
    answer_tokens: int = 128
    vocabulary: int = 4000


@dataclass(slots=True)
class Traffic:
    """What the other requests took.

    Attributes:
        answers: start and result of each request, by the run's clock.
        failures: requests that failed.
    """

    answers: list[tuple[float, TurnResult]] = field(default_factory=list)
    failures: int = 0

    def gaps_during(self, windows: Sequence[tuple[float, float]]) -> list[float]:
        """Seconds between two chunks of one answer that ended within one of the windows.

        Args:
            windows: start and end of each, by the run's clock.
        """
        gaps = []
        for started, result in self.answers:
            at = started + result.ttft_seconds
            for gap in result.gaps_seconds:
                at += gap
                if any(begin <= at <= end for begin, end in windows):
                    gaps.append(gap)
        return gaps


@asynccontextmanager
async def traffic(
    turns: TurnRunner,
    plan: TrafficPlan,
    *,
    name: str,
    source: random.Random,
    clock: Callable[[], float],
) -> AsyncIterator[Traffic]:
    """Keep a number of requests running while the block runs.

    Args:
        turns: takes them.
        plan: how many.
        name: prefix of their names; must not have been used before.
        source: of tokens.
        clock: monotonic seconds.
    """
    seen = Traffic()

    async def keep_asking(lane: int) -> None:
        asked = 0
        while True:
            asked += 1
            prompt = [source.randrange(10, plan.vocabulary) for _ in range(plan.prompt_tokens)]
            request = TurnRequest(f"{name}-{lane}-{asked}", prompt, plan.answer_tokens, False, True)
            started = clock()
            try:
                result = await turns.run(request)
            except KvloopError:
                seen.failures += 1
                await asyncio.sleep(0.1)
                continue
            seen.answers.append((started, result))

    async with asyncio.TaskGroup() as group:
        lanes = [
            group.create_task(keep_asking(lane), name=f"traffic {lane}")
            for lane in range(plan.requests)
        ]
        try:
            yield seen
        finally:
            for lane in lanes:
                lane.cancel()
