"""A stack that answers at once, and time that passes only when told."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvloop.bench.transfers import Transfers
from kvloop.bench.turns import TurnRequest, TurnResult
from kvloop.errors import UnavailableError


class FakeClock:
    """Monotonic seconds; sleeping makes them pass."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def result(
    *,
    tokens: tuple[int, ...] = (11, 12, 13),
    ttft: float = 0.1,
    prompt: int = 100,
    pulled: int = 0,
    cached: int = 0,
    gaps: tuple[float, ...] = (0.01, 0.02),
    miss_reason: str | None = None,
    pull_seconds: float | None = None,
) -> TurnResult:
    """What a turn took; the parts of the prompt add up."""
    return TurnResult(
        token_ids=tokens,
        generated_tokens=len(tokens),
        ttft_seconds=ttft,
        total_seconds=ttft + sum(gaps),
        gaps_seconds=gaps,
        prefill_leg_seconds=ttft * 0.8,
        decode_leg_seconds=ttft * 0.2,
        prompt_tokens=prompt,
        pulled_tokens=pulled,
        cached_tokens=cached,
        recomputed_tokens=prompt - pulled - cached,
        miss_reason=miss_reason,
        retained_tokens=prompt + len(tokens) - 1,
        pull_seconds=pull_seconds,
    )


@dataclass
class FakeTurns:
    """Implements TurnRunner: remembers what was asked.

    Attributes:
        clock: passes by a second in each turn.
        wrong_when_reusing: answers differ where reuse is on.
        failing: conversations whose name contains this fail.
    """

    clock: FakeClock = field(default_factory=FakeClock)
    wrong_when_reusing: bool = False
    failing: str = "no conversation"
    requests: list[TurnRequest] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def run(self, request: TurnRequest) -> TurnResult:
        """Answer with tokens that depend on the prompt alone."""
        self.requests.append(request)
        self.clock.now += 1.0
        if self.failing in request.conversation:
            raise UnavailableError("it is away")
        source = random.Random(hash(tuple(request.prompt)))
        tokens = [source.randrange(10, 4000) for _ in range(request.answer_tokens)]
        if request.reuse and self.wrong_when_reusing:
            tokens[-1] += 1
        held = len(request.prompt) // 2 if request.reuse else 0
        return result(tokens=tuple(tokens), prompt=len(request.prompt), pulled=held)

    async def end(self, conversation: str) -> None:
        """Remember it."""
        self.ended.append(conversation)


@dataclass
class FakePrefill:
    """Implements PrefillEngine: counts resets, and pulls 10 bytes between two looks."""

    resets: int = 0
    looks: int = 0

    async def reset_prefix_cache(self) -> None:
        """Count it."""
        self.resets += 1

    async def transfers(self) -> Transfers:
        """One more pull each time."""
        self.looks += 1
        return Transfers(self.looks, 10.0 * self.looks, 2.0 * self.looks, self.looks, self.looks)
