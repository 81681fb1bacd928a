"""Pauses between attempts double, within bounds, with jitter."""

from __future__ import annotations

import random

import pytest

from services.common.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_again() -> None:
    backoff = Backoff(0.1, 0.5, rng=lambda: 1.0)
    assert [backoff.next_seconds() for _ in range(5)] == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])

    backoff.reset()
    assert backoff.next_seconds() == 0.1
    assert Backoff(9.0, 0.5, rng=lambda: 1.0).next_seconds() == 0.5


def test_jitter_takes_half_of_a_pause_at_most() -> None:
    least, any_one = Backoff(1.0, 4.0, rng=lambda: 0.0), Backoff(1.0, 4.0)
    assert [least.next_seconds() for _ in range(3)] == [0.5, 1.0, 2.0]

    pauses = [any_one.next_seconds() for _ in range(100)]
    assert all(2.0 <= pause <= 4.0 for pause in pauses[2:])
    assert len(set(pauses)) > 50


def test_the_same_randomness_gives_the_same_pauses() -> None:
    one, other = (Backoff(1.0, 60.0, rng=random.Random(7).random) for _ in range(2))
    assert [one.next_seconds() for _ in range(8)] == [other.next_seconds() for _ in range(8)]
