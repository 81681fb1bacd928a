"""Lets an engine of vLLM before 0.29 renew what it retains, so that this is seen on CUDA.

kvloop does not renew there: a prefill engine of these versions does not check
the deadline of the blocks that it reads, and one that comes late would read another
request's (services/worker/engine_traits.py). In `exact` nothing comes late: turns
are taken one after another on idle engines. The mechanism in the engine is the same.

vLLM loads this as a plugin in each of its processes (setup.sh); it acts where
KVLOOP_GPU_RENEW is set.
"""

from __future__ import annotations

import os

RENEW = "KVLOOP_GPU_RENEW"
"""Environment variable that makes it act."""


def register() -> None:
    """vLLM's plugin: say that deadlines are checked."""
    if os.environ.get(RENEW):
        from services.worker import engine_traits

        engine_traits.renews_leases = lambda: True
