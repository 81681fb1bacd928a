"""Ways to retain KV that are compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    """One way to decide what decode keeps, and until when."""

    name: str
    what: str
    leases: bool = True
    """False: vLLM's own way. Every finished turn is kept until it is read or its
    TTL has passed; nothing is released, and nobody knows of conversations."""
    releases: bool = True
    """Blocks are freed when a conversation ends and when a newer turn replaces them."""
    retained_share: float | None = None
    """Share of decode's blocks that may be retained; None: all."""
    lost_share: float = 0.0
    """Share of next turns that may come after their conversation was given up."""


FIXED = Arm("fixed", "fixed TTL of 480 s, as vLLM does alone", leases=False)

ARMS = (
    FIXED,
    Arm("release", "leases; released at the end and when replaced"),
    Arm("budget", "and at most half of the blocks (the default)", retained_share=0.5),
    Arm(
        "horizon",
        "and given up beyond the pauses of 99 % of its tenant's turns (the default)",
        retained_share=0.5,
        lost_share=0.01,
    ),
)
