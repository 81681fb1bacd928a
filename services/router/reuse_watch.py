"""Notices when turns are routed by load alone because nothing is retained for them.

Reuse can stop without any turn failing: the engines' connector reports nothing, the
ledger is away, nothing is pinned. Answers then stay right and become slow. What
turns leave behind says so before the next turns of their conversations come.
"""

from __future__ import annotations

from collections import deque

import structlog

_log = structlog.get_logger(__name__)

_WINDOW = 32
_LEAST = 8
"""Turns before anything is said."""
_DEGRADED = 0.5
"""At this share of turns that left nothing behind reuse counts as lost, ..."""
_RECOVERED = 0.2
"""... and at this it is back."""


class ReuseWatch:
    """Watches the last turns that should have left retained KV behind."""

    def __init__(self) -> None:
        self._lost: deque[bool] = deque(maxlen=_WINDOW)
        self._last_outcome = ""  # of a turn that left nothing behind
        self._degraded = False

    @property
    def degraded(self) -> bool:
        """Whether most turns leave nothing behind for the next one."""
        return self._degraded

    def ended(self, *, retained: bool, outcome: str) -> None:
        """A turn was answered that should have left retained KV behind.

        Args:
            retained: whether it did.
            outcome: why not, for the log.
        """
        self._lost.append(not retained)
        if not retained:
            self._last_outcome = outcome
        if len(self._lost) < _LEAST:
            return
        share = sum(self._lost) / len(self._lost)
        if not self._degraded and share >= _DEGRADED:
            self._degraded = True
            _log.error(
                "reuse_degraded",
                lost=f"{share:.0%} of the last {len(self._lost)} turns",
                last_outcome=self._last_outcome,
                hint="turns are routed by load alone, and prompts are computed in full; see "
                "whether the engines run kvloop's connector, and whether kvmeta answers",
            )
        elif self._degraded and share <= _RECOVERED:
            self._degraded = False
            _log.warning("reuse_recovered")
