"""How much decode memory retained KV may take, and what gives way first.

Pure functions: what is retained comes in, what to free comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

RetentionPolicy = Literal["lru", "value"]
"""Name of a rule for what gives way first."""


class Shortage(StrEnum):
    """Why blocks must be freed."""

    BUDGET = "budget"
    """More is retained than the share that may be."""
    LOW = "low"
    """Fewer blocks are free than shall be."""
    PRESSURE = "pressure"
    """A request waits for blocks."""


@dataclass(frozen=True)
class BlockShares:
    """What retained KV may take of an engine's blocks."""

    retained: float
    """Share that may be retained at most, above 0 and up to 1."""
    free: float
    """Share that shall be free at least, from 0 to below 1."""


@dataclass(frozen=True)
class BlockUse:
    """An engine's KV blocks now."""

    total: int
    retained: int
    """Under pins, those that are being released not included."""
    coming_free: int = 0
    """Under pins that are being released."""
    free: int | None = None
    """In nobody's use; None if nobody has looked."""
    waited_for: int = 0
    """Blocks that a request waits for."""


def blocks_to_free(use: BlockUse, shares: BlockShares) -> tuple[int, Shortage] | None:
    """How many retained blocks must go, and why; None if there are enough."""
    wanted = {Shortage.BUDGET: use.retained - math.floor(shares.retained * use.total)}
    if use.free is not None:
        lacking = math.ceil(shares.free * use.total) - use.free
        wanted[Shortage.LOW] = lacking - use.coming_free
    wanted[Shortage.PRESSURE] = use.waited_for - use.coming_free
    shortage = max(wanted, key=lambda reason: wanted[reason])
    return (wanted[shortage], shortage) if wanted[shortage] > 0 else None


@dataclass(frozen=True)
class Candidate:
    """A pin that may be freed."""

    turn_id: str
    num_blocks: int
    num_tokens: int
    silent_seconds: float
    """Since its turn ended."""
    chance: float
    """Chance that its conversation's next turn comes while it is kept, 0 to 1."""


def _recency(candidate: Candidate) -> float:
    return -candidate.silent_seconds


def _value(candidate: Candidate) -> float:
    """Tokens that a next turn would not have to compute, as expected, per block."""
    return candidate.num_tokens * candidate.chance / max(candidate.num_blocks, 1)


POLICIES: Mapping[RetentionPolicy, Callable[[Candidate], float]] = {
    "lru": _recency,
    "value": _value,
}
"""What each policy holds a block of a candidate to be worth. The least goes first."""


def choose(
    candidates: Sequence[Candidate], num_blocks: int, policy: RetentionPolicy
) -> list[Candidate]:
    """What to free, so that at least so many blocks come free, if that can be.

    The least worthy are taken until there are enough; of these, the worthiest are
    spared whose blocks turn out not to be needed. Of equals, the one that has been
    silent for longest goes first.
    """
    worth = POLICIES[policy]
    chosen: list[Candidate] = []
    missing = num_blocks
    for candidate in sorted(candidates, key=lambda one: (worth(one), -one.silent_seconds)):
        if missing <= 0:
            break
        chosen.append(candidate)
        missing -= candidate.num_blocks
    for candidate in reversed(chosen[:]):
        if candidate.num_blocks <= -missing:
            chosen.remove(candidate)
            missing += candidate.num_blocks
    return chosen
