"""Ways that share the first turn of a repetition, and nothing of the one that is measured."""

from __future__ import annotations

import random

import pytest

from bench.gpu.openings import sharing_openings
from kvloop.bench.rounds import RoundPlan, Variant, run_rounds
from kvloop.bench.samples import Shape
from kvloop.bench.transfers import Transfers
from kvloop.bench.turns import TurnRequest, TurnResult

_SHAPE = Shape(300, answer_tokens=16, message_tokens=200)


class _Turns:
    """Keeps what it was asked."""

    def __init__(self, order: list[str]) -> None:
        self.asked: list[TurnRequest] = []
        self._order = order

    async def run(self, request: TurnRequest) -> TurnResult:
        self.asked.append(request)
        self._order.append("last turn" if request.last else "turn")
        return TurnResult(
            token_ids=tuple(range(request.answer_tokens)),
            generated_tokens=request.answer_tokens,
            ttft_seconds=0.1,
            total_seconds=0.2,
            gaps_seconds=(),
            prefill_leg_seconds=0.05,
            decode_leg_seconds=0.05,
            prompt_tokens=len(request.prompt),
            pulled_tokens=0,
            cached_tokens=0,
            recomputed_tokens=0,
            miss_reason=None,
            retained_tokens=0,
        )

    async def end(self, conversation: str) -> None:
        """Nothing is retained."""


class _Prefill:
    """A prefill engine that pulls nothing."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    async def reset_prefix_cache(self) -> None:
        self._order.append("emptied")

    async def transfers(self) -> Transfers:
        return Transfers()


@pytest.fixture
async def asked() -> tuple[dict[str, list[TurnRequest]], list[str]]:
    order: list[str] = []
    turns = {name: _Turns(order) for name in ("on", "off", "own-on")}
    variants = [Variant(name, each, True, _Prefill(order)) for name, each in turns.items()]
    plan = RoundPlan([_SHAPE], repetitions=1, warm_ups=0, cold=False, settle_seconds=0)
    await run_rounds(
        sharing_openings(variants), plan, name="run", source=random.Random(1), clock=lambda: 0.0
    )
    return {name: each.asked for name, each in turns.items()}, order


async def test_the_ways_find_each_others_openings(asked) -> None:
    by_way, _ = asked
    openings = [first for first, _ in by_way.values()]
    assert len({tuple(opening.prompt) for opening in openings}) == 1
    assert len({(opening.cache_salt) for opening in openings}) == 1
    assert openings[0].cache_salt


async def test_the_turns_that_are_measured_share_the_history_alone(asked) -> None:
    by_way, _ = asked
    measured = [tuple(last.prompt) for _, last in by_way.values()]
    history = _SHAPE.context_tokens + _SHAPE.answer_tokens
    assert len({prompt[:history] for prompt in measured}) == 1
    assert len({prompt[history] for prompt in measured}) == len(measured)
    assert len({tuple(sorted(prompt)) for prompt in measured}) == 1


async def test_prefill_is_emptied_right_before_each_turn_that_is_measured(asked) -> None:
    _, order = asked
    before = [order[place - 1] for place, what in enumerate(order) if what == "last turn"]
    assert before == ["emptied"] * 3
    assert order.count("emptied") == 3
