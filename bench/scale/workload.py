"""Conversations with heavy tails: most turns are short, some are very long."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

_LONGEST_PROMPT = 120_000


@dataclass(frozen=True)
class Workload:
    """How people talk. Medians and sigmas are those of log-normal distributions."""

    seconds: float
    """Conversations begin during this time."""
    turns_per_second: float
    """Turns that arrive, over all conversations."""
    mean_turns: float = 6.0
    first_tokens: float = 1500.0
    first_sigma: float = 1.3
    added_tokens: float = 300.0
    added_sigma: float = 1.3
    answer_tokens: float = 200.0
    answer_sigma: float = 0.9
    pause_seconds: float = 20.0
    pause_sigma: float = 1.0


@dataclass(frozen=True)
class Turn:
    """One turn of a script."""

    new_tokens: int
    """Tokens of the prompt that are not in the conversation so far."""
    answer_tokens: int
    pause_seconds: float
    """Between the end of the turn before and this one."""


@dataclass(frozen=True)
class Script:
    """One conversation."""

    start: float
    turns: tuple[Turn, ...]


def scripts(workload: Workload, seed: int) -> Iterator[Script]:
    """Conversations in the order of their start."""
    rng = Random(seed)
    now, rate = 0.0, workload.turns_per_second / workload.mean_turns
    while (now := now + rng.expovariate(rate)) < workload.seconds:
        yield Script(now, tuple(_turns(workload, rng)))


def _turns(workload: Workload, rng: Random) -> Iterator[Turn]:
    length = 0
    median, sigma = workload.first_tokens, workload.first_sigma
    while True:
        new = 16 + int(rng.lognormvariate(math.log(median), sigma))
        answer = 1 + int(
            rng.lognormvariate(math.log(workload.answer_tokens), workload.answer_sigma)
        )
        new = min(new, _LONGEST_PROMPT // 2)
        length += new + answer
        pause = rng.lognormvariate(math.log(workload.pause_seconds), workload.pause_sigma)
        if length > _LONGEST_PROMPT:
            return
        yield Turn(new, answer, pause)
        median, sigma = workload.added_tokens, workload.added_sigma
        if rng.random() < 1 / workload.mean_turns:
            return
