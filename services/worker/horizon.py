"""How long to wait for a conversation's next turn, from how long pauses have been.

Most next turns come soon, and what is retained for the rest of a TTL is mostly
for conversations that nobody goes on with. So each tenant's pauses give a horizon:
the shortest silence after which no more than a small share of next turns is still
to come. Longer silences are given up; that share is what it costs. Pure functions.

What is given up early is never seen to come back. One conversation in sixteen is
therefore kept to its end all the same, so that longer pauses stay known.
"""

from __future__ import annotations

import zlib

from services.worker.gaps import Outlook

_KEPT_ANYWAY = 16
_STEP = 2**0.25
_SHORTEST_SECONDS = 2.0


def horizon_seconds(outlook: Outlook, *, ttl_seconds: float, lost_share: float) -> float:
    """The silence after which a conversation is given up; at most its TTL.

    Args:
        outlook: of the tenant.
        ttl_seconds: how long it is kept otherwise.
        lost_share: share of next turns that may come too late, 0 to 1.
    """
    all_turns = outlook.chance(0.0, ttl_seconds)
    seconds = _SHORTEST_SECONDS
    while seconds < ttl_seconds:
        if outlook.chance(0.0, seconds) >= (1 - lost_share) * all_turns:
            return seconds
        seconds *= _STEP
    return ttl_seconds


def kept_anyway(turn_id: str) -> bool:
    """Whether a turn's KV is kept to its end, to see how long pauses can be."""
    return zlib.crc32(turn_id.encode()) % _KEPT_ANYWAY == 0
