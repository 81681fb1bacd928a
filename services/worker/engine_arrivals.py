"""How an engine that does nothing but wait for blocks notices that they are there.

vLLM looks after its transfers once a step, a millisecond apart while nothing else
runs, and hears of an end one or two steps later. A short pull is over sooner than
that. Here an empty step waits a little for the transfers that are under way, so that its
own outcome tells of their end.

Only the standard library is used: this module runs inside vLLM's workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LONGEST_SECONDS = 0.002
"""Longest wait of a step: what else comes in has to wait as long."""
LOOK_SECONDS = 0.0001
"""Pause between two looks, in which other threads run."""
_UNDER_WAY = "PROC"
"""NIXL's name for the state of a transfer that has not ended."""


def await_arrival(
    transfers: Mapping[str, Sequence[Any]],
    state_of: Callable[[Any], str],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until all transfers of a request have ended, or for `LONGEST_SECONDS`.

    Args:
        transfers: handles of reads that are under way, by request.
        state_of: state of one of them, by NIXL.
        clock: monotonic seconds.
        sleep: sleeps for so many seconds.

    Raises:
        Exception: whatever `state_of` raises.
    """
    deadline = clock() + LONGEST_SECONDS
    while transfers and all(
        any(state_of(handle) == _UNDER_WAY for handle in handles) for handles in transfers.values()
    ):
        if clock() >= deadline:
            return
        sleep(LOOK_SECONDS)
