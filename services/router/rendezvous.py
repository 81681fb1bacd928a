"""Which worker a prompt's beginning belongs to (rendezvous hashing). Pure functions.

Each worker draws a number from its own name and the beginning's, and the highest
wins. All routers come to the same result without talking to each other, and when
workers come or go, only what was theirs moves.
"""

from __future__ import annotations

from services.router.candidates import Roster

FAVOURITES = 2
"""Workers that are told apart by what they may have cached."""


def draw(number: int, affinity: int) -> int:
    """What the worker with that number draws for that beginning.

    A tuple of integers has the same hash in every process of CPython; only those of
    strings are salted.
    """
    return hash((number ^ affinity, affinity))


def favourites(candidates: Roster, affinity: int) -> tuple[str, ...]:
    """The worker that a beginning belongs to, and who stands in for it.

    Only workers that can be used count. Fewer than two where there are no more.
    """
    usable = candidates.usable
    drawn = [draw(number, affinity) for number in candidates.numbers]
    found = []
    for _ in range(min(FAVOURITES, len(usable))):
        place = drawn.index(max(drawn))
        found.append(usable[place].worker_id)
        drawn[place] = -(1 << 63)
    return tuple(found)
