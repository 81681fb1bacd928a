"""Notices that a request waits for KV blocks while others are retained.

Only the standard library is used: this module runs inside vLLM's scheduler, in every
step.
"""

from __future__ import annotations

from collections.abc import Callable

REPORT_INTERVAL_SECONDS = 0.05
"""A shortage is reported no more often than this."""


class Pressure:
    """Watches scheduling passes.

    In a pass vLLM asks the connector about a waiting request, then allocates
    blocks for it, then tells the connector. If it does not get that far, the
    request waits for blocks, or the pass has used up its tokens.

    Args:
        clock: seconds.
        block_size: tokens per block.
    """

    def __init__(self, clock: Callable[[], float], block_size: int) -> None:
        self._clock = clock
        self._block_size = block_size
        self._asked: dict[str, int] = {}
        self._last_report = float("-inf")

    def asked(self, request_id: str, num_tokens: int) -> None:
        """vLLM is about to look for blocks for so many tokens more."""
        self._asked[request_id] = num_tokens

    def granted(self, request_id: str) -> None:
        """vLLM has found them."""
        self._asked.pop(request_id, None)

    def blocks_missing(
        self, free_blocks: Callable[[], int | None], scheduled_tokens: int
    ) -> int | None:
        """End a pass.

        Args:
            free_blocks: tells how many blocks a waiting request may have; None if
                unknown. Called only if there is something to report.
            scheduled_tokens: what the pass has scheduled.

        Returns:
            By how many blocks the requests that got none fall short, at least 1;
            None if there is nothing to report.
        """
        if not self._asked:
            return None
        tokens = sum(self._asked.values())
        self._asked.clear()
        now = self._clock()
        if now - self._last_report < REPORT_INTERVAL_SECONDS:
            return None
        free = free_blocks()
        missing = -(-tokens // self._block_size) - (free or 0)
        if missing <= 0 and (free is not None and scheduled_tokens > 0):
            # There are enough blocks: the pass has used up its tokens.
            return None
        self._last_report = now
        return max(missing, 1)
