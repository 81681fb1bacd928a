"""Conversations of agents: when their turns come, how long they are, how they end."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class End(StrEnum):
    """How a conversation ends."""

    SAID = "said"
    """The client says so: EndConversation, or DELETE on the gateway."""
    SILENT = "silent"
    """The work is done and nobody says so."""
    ABANDONED = "abandoned"
    """It breaks off before its work is done."""


@dataclass(frozen=True)
class Workload:
    """What agents do.

    Gaps run from the end of an answer to the next turn: a tool runs, or a person
    reads. They are lognormal.
    """

    hours: float = 3.0
    conversations_per_minute: float = 12.0
    mean_turns: float = 12.0
    """Of conversations that are not abandoned; at least 2, geometric."""
    median_gap_seconds: float = 5.0
    gap_sigma: float = 1.3
    """Of the gap's logarithm: 1.3 puts 1 % beyond 20 times the median."""
    abandoned: float = 0.1
    """Share of conversations that break off after a turn, each equally likely."""
    ends_said: float = 1.0
    """Share of the others whose end is said."""
    tenants: int = 4
    first_prompt_tokens: tuple[int, int] = (2_000, 8_000)
    turn_tokens: tuple[int, int] = (200, 1_500)
    """What a turn adds: question or tool output, and answer."""
    turn_seconds: tuple[float, float] = (2.0, 8.0)


@dataclass(frozen=True)
class Turn:
    """One turn of the script."""

    gap_seconds: float
    """Since the end of the turn before; 0 for the first."""
    seconds: float
    num_tokens: int
    """What decode holds at its end."""


@dataclass(frozen=True)
class Script:
    """One conversation, the same whatever retention does."""

    name: str
    tenant: str
    start: float
    turns: tuple[Turn, ...]
    end: End


def scripts(workload: Workload, seed: int) -> Iterator[Script]:
    """The conversations of a run, in order of their start."""
    source = random.Random(seed)
    now = 0.0
    number = 0
    while True:
        now += source.expovariate(workload.conversations_per_minute / 60)
        if now > workload.hours * 3600:
            return
        number += 1
        yield _script(workload, source, f"c{number}", now)


def _script(workload: Workload, source: random.Random, name: str, start: float) -> Script:
    count = 2
    while source.random() > 1 / max(workload.mean_turns - 1, 1.0):
        count += 1
    end = End.SAID if source.random() < workload.ends_said else End.SILENT
    if source.random() < workload.abandoned:
        count, end = source.randint(1, count - 1), End.ABANDONED
    tokens = source.randint(*workload.first_prompt_tokens)
    turns = []
    for number in range(count):
        tokens += source.randint(*workload.turn_tokens)
        mu = math.log(workload.median_gap_seconds)
        gap = source.lognormvariate(mu, workload.gap_sigma) if number else 0.0
        turns.append(Turn(gap, source.uniform(*workload.turn_seconds), tokens))
    tenant = f"tenant-{source.randrange(workload.tenants)}"
    return Script(name, tenant, start, tuple(turns), end)
