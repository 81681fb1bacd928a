"""The EngineCore that a connector runs in, as far as the connector needs to see it.

vLLM gives a connector no way to see that a request has arrived, or how many blocks are
free. Its engine builds the scheduler, and with it the connector, in its own
constructor, so the engine is found among the callers.

Only the standard library is used: this module runs inside vLLM.
"""

from __future__ import annotations

import queue
import sys
from types import FrameType
from typing import Any

_LOCKSTEP_ENGINE = "DPEngineCoreProc"
"""vLLM's engine whose data-parallel ranks step together: one must not wait alone."""


class RunningEngine:
    """An EngineCoreProc of vLLM.

    Args:
        core: it has an `input_queue`, filled by another thread, and a `scheduler`
            once it is built.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._queue: queue.Queue[Any] = core.input_queue
        self._woken = False

    def has_requests(self) -> bool:
        """True if a request runs or waits. Retained blocks alone are none."""
        return bool(self._core.scheduler.has_unfinished_requests()) or not self._queue.empty()

    def free_blocks(self) -> int | None:
        """KV blocks that a waiting request may have; None if this vLLM does not tell.

        Newer vLLM keeps some back, for requests that are still loading or computing
        their prompts, and as a watermark.
        """
        scheduler = self._core.scheduler
        manager = getattr(scheduler, "kv_cache_manager", None)
        pool = getattr(manager, "block_pool", None)
        if pool is None:
            return None
        reserved = getattr(scheduler, "_inflight_prefill_reserved_blocks", int)()
        watermark = getattr(manager, "watermark_blocks", 0)
        return int(pool.get_num_free_blocks() - reserved - watermark)

    def wait(self, seconds: float) -> bool:
        """Wait until a client's message arrives or `wake` is called; False if neither did."""
        with self._queue.not_empty:
            if not self._queue.queue and not self._woken:
                self._queue.not_empty.wait(seconds)
            woken = self._woken or bool(self._queue.queue)
            self._woken = False
        return woken

    def wake(self) -> None:
        """End a wait, or the next one. For any thread."""
        with self._queue.not_empty:
            self._woken = True
            self._queue.not_empty.notify()


def find_running_engine() -> RunningEngine | None:
    """The engine that is building the caller; None if it is none that may wait.

    An engine inside the client's own process has no input queue.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        attributes = getattr(owner, "__dict__", None)
        if isinstance(attributes, dict) and isinstance(attributes.get("input_queue"), queue.Queue):
            lockstep = any(kind.__name__ == _LOCKSTEP_ENGINE for kind in type(owner).__mro__)
            return None if lockstep else RunningEngine(owner)
        frame = frame.f_back
    return None
