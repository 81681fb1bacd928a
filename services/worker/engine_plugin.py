"""kvloop's plugin of vLLM: all that it changes in an engine's processes beside the connector.

vLLM loads it (entry point `vllm.general_plugins`) in each of its processes.
Runs inside vLLM: imports only the standard library, and siblings that do the same.
"""

from __future__ import annotations

import os

from services.worker import engine_detokenizer, engine_front
from services.worker.engine_events import EVENTS_SOCKET


def register() -> None:
    """vLLM's plugin. Without a sidecar beside the engine vLLM is left as it is."""
    if not os.environ.get(EVENTS_SOCKET):
        return
    engine_detokenizer.register()
    engine_front.register()
