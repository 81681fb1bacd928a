"""What kvloop's plugins say in the log of the engine that they change.

Runs inside vLLM: imports only the standard library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("vllm.kvloop")


def said_once() -> Callable[[int, str], None]:
    """Logs a text at a level, and nothing when it gets that text again.

    For what is found with requests: plugins are loaded before vLLM sets up its logs, and what
    is true of one request is true of many.
    """
    said: set[str] = set()

    def say(level: int, text: str) -> None:
        if text not in said:
            said.add(text)
            logger.log(level, text)

    return say
