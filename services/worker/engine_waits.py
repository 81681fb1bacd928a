"""How vLLM's processes wait for each other's messages, made gentler.

vLLM's shared-memory queues spin for a second after every message, so an engine that
steps without end keeps its worker spinning for ever.

Runs inside vLLM: imports only the standard library and vLLM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

SPIN_SECONDS = 0.002
"""How long a process that is to be gentle spins for the next message."""
POLL_MILLISECONDS = 5
"""Pause between two looks after transfers of a process that waits for a message."""


def wait_gently(when: Callable[[], bool], poll: Callable[[], bool] | None = None) -> None:
    """Let waits of this process for a message sleep after two milliseconds.

    Args:
        when: waits spin as vLLM wants while this is false.
        poll: called in sleeping waits, every few milliseconds while it returns True.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    condition = getattr(shm_broadcast, "SpinCondition", None)
    if condition is None:
        return  # an older vLLM
    # The method as vLLM has it, though this may be called for both halves of a connector.
    original = getattr(condition.wait, "kvloop_original", condition.wait)

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        if not hasattr(self, "kvloop_spin_seconds"):
            self.kvloop_spin_seconds = self.busy_loop_s
        self.busy_loop_s = SPIN_SECONDS if when() else self.kvloop_spin_seconds
        sleeps = time.monotonic() > self.last_read + self.busy_loop_s
        if sleeps and poll is not None and poll():
            longest = POLL_MILLISECONDS
            timeout_ms = longest if timeout_ms is None else min(timeout_ms, longest)
        # Returning early is allowed: the caller looks for a message and waits again.
        original(self, timeout_ms)

    wait.kvloop_original = original  # type: ignore[attr-defined]
    condition.wait = wait


class TransferPoll:
    """Moves a worker's transfers on while it waits for its next step.

    Without NIXL's own thread a transfer that another engine reads from here only
    moves while this process looks after it. vLLM does so once a step, and an engine
    that does nothing but retain blocks makes few of them.

    Args:
        worker: the worker half of NixlConnector. Its agent is replaced by one that
            hands out what was found between steps with the next one.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._receive: Callable[[], dict[Any, list[bytes]]] = worker.nixl_wrapper.get_new_notifs
        self._found: dict[Any, list[bytes]] = {}
        self._thread: int | None = None
        worker.nixl_wrapper.get_new_notifs = self.take

    def poll(self) -> bool:
        """Look once; False if there is nothing to look after, or this is another thread."""
        if threading.get_ident() != self._thread or not self._worker._reqs_to_process:
            return False
        self._collect()
        return True

    def take(self) -> dict[Any, list[bytes]]:
        """All notifications since the last call, for vLLM's step."""
        self._thread = threading.get_ident()
        self._collect()
        found, self._found = self._found, {}
        return found

    def _collect(self) -> None:
        for agent, messages in self._receive().items():
            self._found.setdefault(agent, []).extend(messages)
