"""Cures for vLLM's CPU build when it transfers KV over NIXL.

Without them, a pair of engines on a small machine takes 5 to 60 s for
requests that need 0.3 s (measured with vLLM 0.32 and nixl 1.5.1 on two cores).
CUDA engines are left alone.

Only the standard library and what vLLM brings are used.
"""

from __future__ import annotations

import functools
import importlib
import os

PAUSE_SECONDS = 0.005
"""Pause in a scheduling step that schedules nothing, so that engines that wait for a
transfer leave the cores to those that compute. A new request ends it."""


def poll_transfers_inline() -> None:
    """Make vLLM create its NIXL agent without a progress thread.

    On the TCP and shared-memory transports that thread spins on a whole core.
    The engine polls its transfers in every step anyway. Call before the worker
    half of the connector is built.
    """
    for name in ("worker", "base_worker"):
        try:
            module = importlib.import_module(
                f"vllm.distributed.kv_transfer.kv_connector.v1.nixl.{name}"
            )
        except ImportError:
            continue
        config = getattr(module, "nixl_agent_config", None)
        if config is not None and not isinstance(config, functools.partial):
            module.nixl_agent_config = functools.partial(  # type: ignore[attr-defined]
                config, enable_prog_thread=False
            )


def use_all_cores() -> None:
    """Undo the pinning of this process to one core.

    vLLM's CPU build pins the workers of all engines on a machine to the same
    core, also with VLLM_CPU_OMP_THREADS_BIND=nobind.
    """
    cores = range(os.cpu_count() or 1)
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except OSError:
            continue  # the thread has ended
