"""kvloop's plugin of vLLM: all that it changes in an engine's processes beside the connector.

vLLM loads it (entry point `vllm.general_plugins`) in each of its processes.
Runs inside vLLM: imports only siblings that do the same.
"""

from __future__ import annotations

from services.worker import engine_detokenizer, engine_front


def register() -> None:
    """vLLM's plugin. Without a sidecar beside the engine vLLM is left as it is."""
    engine_detokenizer.register()
    engine_front.register()
