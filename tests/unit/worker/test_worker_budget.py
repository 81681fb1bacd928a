"""How much must go, and what goes first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.budget import (
    POLICIES,
    BlockShares,
    BlockUse,
    Candidate,
    RetentionPolicy,
    Shortage,
    blocks_to_free,
    choose,
)

SHARES = BlockShares(retained=0.5, free=0.1)


def _candidate(name: str, blocks: int = 10, silent: float = 10.0, chance: float = 0.5) -> Candidate:
    return Candidate(name, blocks, blocks * 32, silent, chance)


def _names(chosen: list[Candidate]) -> list[str]:
    return [candidate.turn_id for candidate in chosen]


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (BlockUse(total=1000, retained=0), None),
        (BlockUse(total=1000, retained=500), None),
        (BlockUse(total=1000, retained=501), (1, Shortage.BUDGET)),
        (BlockUse(total=1000, retained=400, free=100), None),
        (BlockUse(total=1000, retained=400, free=70), (30, Shortage.LOW)),
        (BlockUse(total=1000, retained=400, free=70, coming_free=30), None),
        (BlockUse(total=1000, retained=520, free=99), (20, Shortage.BUDGET)),
        (BlockUse(total=1000, retained=9, waited_for=40), (40, Shortage.PRESSURE)),
        (BlockUse(total=1000, retained=9, waited_for=40, coming_free=50), None),
        (BlockUse(total=1000, retained=9, free=95, waited_for=40), (40, Shortage.PRESSURE)),
        (BlockUse(total=0, retained=0, free=0), None),
    ],
)
def test_what_must_go(use: BlockUse, expected: tuple[int, Shortage] | None) -> None:
    assert blocks_to_free(use, SHARES) == expected


def test_lru_frees_the_longest_silent_whatever_it_holds() -> None:
    candidates = [
        _candidate("new", silent=1, chance=0.01),
        _candidate("old", silent=100, chance=0.99),
        _candidate("older", silent=200, chance=0.99),
    ]
    assert _names(choose(candidates, 15, "lru")) == ["older", "old"]


def test_value_frees_what_is_least_likely_to_return() -> None:
    candidates = [
        _candidate("lost", silent=1, chance=0.01),
        _candidate("likely", silent=100, chance=0.99),
        _candidate("even", silent=50, chance=0.5),
    ]
    assert _names(choose(candidates, 15, "value")) == ["lost", "even"]


def test_value_counts_tokens_per_block() -> None:
    """Of equal chances the one whose blocks are poorly filled saves less per block."""
    full = _candidate("full")
    poor = replace(full, turn_id="poor", num_tokens=full.num_tokens // 2)
    assert _names(choose([full, poor], 1, "value")) == ["poor"]


def test_of_equals_the_longest_silent_goes_first() -> None:
    candidates = [_candidate("b", silent=5), _candidate("a", silent=9), _candidate("c", silent=7)]
    assert _names(choose(candidates, 20, "value")) == ["a", "c"]


def test_what_turns_out_not_to_be_needed_is_spared() -> None:
    candidates = [
        _candidate("small", blocks=5, chance=0.1),
        _candidate("big", blocks=100, chance=0.2),
    ]
    assert _names(choose(candidates, 50, "value")) == ["big"]


def test_if_all_is_not_enough_all_of_it_goes() -> None:
    assert _names(choose([_candidate("a"), _candidate("b")], 1000, "lru")) == ["a", "b"]


def test_nothing_goes_when_nothing_is_needed_or_there() -> None:
    assert choose([_candidate("a")], 0, "lru") == []
    assert choose([], 10, "value") == []


@pytest.mark.parametrize("policy", POLICIES)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1e6), st.floats(0, 1)), max_size=20),
    st.integers(0, 400),
)
def test_enough_goes_and_not_one_more(
    policy: RetentionPolicy, pins: list[tuple[int, float, float]], wanted: int
) -> None:
    candidates = [
        Candidate(str(index), blocks, blocks * 32, silent, chance)
        for index, (blocks, silent, chance) in enumerate(pins)
    ]
    chosen = choose(candidates, wanted, policy)
    freed = sum(candidate.num_blocks for candidate in chosen)
    assert freed >= min(wanted, sum(candidate.num_blocks for candidate in candidates))
    if freed >= wanted:
        assert all(freed - candidate.num_blocks < wanted for candidate in chosen)
