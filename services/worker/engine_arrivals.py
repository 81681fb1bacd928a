"""How an engine that does nothing but wait for blocks notices that they are there.

vLLM looks after its transfers once a step, a millisecond apart while nothing else
runs, and hears of an end one or two steps later. A short pull is over sooner than
that. Here an empty step waits a little for the transfers that are under way, so that its
own outcome tells of their end.

Only the standard library is used: this module runs inside vLLM's scheduler and workers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LONGEST_SECONDS = 0.002
"""Longest wait of a step: what else comes in has to wait as long."""
LOOK_SECONDS = 0.0001
"""Pause between two looks, in which other threads run."""
_UNDER_WAY = "PROC"
"""NIXL's name for the state of a transfer that has not ended."""
_NIXL = "nixl"
"""What the names of NIXL's packages begin with (nixl_cu12, nixl_cu13)."""

_OTHER = "kvloop: this vLLM keeps its reads elsewhere; empty steps do not wait for them"
_FAILED = "kvloop: empty steps do not wait for reads any more, since looking at them failed"
_logger = logging.getLogger("vllm.kvloop.arrivals")


class QuietSteps:
    """Tells the steps in and beside which an engine computes nothing.

    A step is scheduled while others run: with asynchronous scheduling one, with
    pipeline stages as many. A wait in it would hold up their outcome, or what follows.

    Args:
        steps_in_flight: how many there are at most, this one included.
        lockstep: other engines' steps may need this one's, so that none of them is quiet.
    """

    def __init__(self, steps_in_flight: int, *, lockstep: bool) -> None:
        self._others = steps_in_flight - 1
        self._lockstep = lockstep
        self._empty_before = self._others

    def schedule(self, tokens: int) -> bool:
        """True if the next step is quiet.

        Args:
            tokens: that it computes.
        """
        beside = self._empty_before < self._others
        self._empty_before = 0 if tokens else self._empty_before + 1
        return not (tokens or beside or self._lockstep)


class Arrivals:
    """The reads of one worker that are under way, and the wait for them.

    If this vLLM keeps them elsewhere, or looking at them fails in a way that nobody
    foresaw, nothing is waited for, and the log says so once.

    Args:
        worker: the worker half of NixlConnector.
        clock: monotonic seconds.
        sleep: sleeps for so many seconds.
    """

    def __init__(
        self,
        worker: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        reads = getattr(worker, "_recving_transfers", None)
        state_of = getattr(getattr(worker, "nixl_wrapper", None), "check_xfer_state", None)
        self._reads: Mapping[str, Sequence[Any]] = {}
        self._state_of: Callable[[Any], str] | None = None
        if isinstance(reads, Mapping) and callable(state_of):
            self._reads, self._state_of = reads, state_of
        else:
            _logger.warning(_OTHER)

    def wait(self) -> None:
        """Wait until all reads of a request have ended, or for `LONGEST_SECONDS`."""
        if self._state_of is None:
            return
        try:
            self._wait(self._state_of)
        except Exception:  # a wait is no reason to fail a step
            self._state_of = None
            _logger.warning(_FAILED, exc_info=True)

    def _wait(self, state_of: Callable[[Any], str]) -> None:
        deadline = self._clock() + LONGEST_SECONDS
        while self._reads and all(
            any(_under_way(state_of, handle) for handle in handles)
            for handles in list(self._reads.values())
        ):
            if self._clock() >= deadline:
                return
            self._sleep(LOOK_SECONDS)


def _under_way(state_of: Callable[[Any], str], handle: Any) -> bool:
    """True if a transfer has not ended. One that NIXL reports as broken has."""
    try:
        return state_of(handle) == _UNDER_WAY
    except Exception as error:
        # vLLM gets the same error from its own look, and tells of a failed read.
        if type(error).__module__.startswith(_NIXL):
            return False
        raise
