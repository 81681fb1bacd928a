"""Whether decode is to get the prompt of a chat as the token ids that prefill made of it.

Otherwise it applies the template and tokenizes once more, which takes a long chat some
3 ms for each thousand tokens. vLLM 0.32 and newer take the ids from the transfer params;
older ones would carry them along unused.
"""

from __future__ import annotations

import re

from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import registry_pb2
from services.router.request import TurnRequest

_SINCE = (0, 32)
_LEAST_BODY_BYTES = 4096
"""Of shorter chats the ids take as long as making them."""
_VERSION = re.compile(r"(\d+)\.(\d+)")


def takes_token_ids(request: TurnRequest, decode: registry_pb2.Worker | None) -> bool:
    """True if prefill shall hand the prompt's token ids over.

    Args:
        request: the turn.
        decode: the decode worker chosen for it.
    """
    if decode is None or request.api != common_pb2.API_CHAT_COMPLETIONS:
        return False
    version = _VERSION.match(decode.traits.vllm_version)
    return (
        version is not None
        and (int(version[1]), int(version[2])) >= _SINCE
        and len(request.body_json) >= _LEAST_BODY_BYTES
    )
