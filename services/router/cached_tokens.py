"""Tells OpenAI clients in `usage` what the receipt tells gRPC clients.

`usage.prompt_tokens_details.cached_tokens` is the number of prompt tokens that
were not computed for this request. The decode engine cannot know it: to it all
of a handed-over prompt is cached.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvloop.common.v1 import common_pb2

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OPTIONAL_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_DETAILS = "prompt_tokens_details"


def with_cached_tokens(piece: bytes, report: common_pb2.PrefillReport) -> bytes:
    """A chunk or a whole reply with that member set; every other value as it was.

    Args:
        piece: JSON as the engine wrote it. Without usage it stays the same.
        report: what the prefill engine did with the prompt.
    """
    if b'"usage"' not in piece or b'"usage":null' in piece:
        return piece
    try:
        members: dict[str, Any] = dict(_MEMBERS.decode(piece))
        usage = _OPTIONAL_MEMBERS.decode(members.get("usage", b"null"))
        if usage is None:
            return piece
        details: dict[str, Any] = dict(_OPTIONAL_MEMBERS.decode(usage.get(_DETAILS, b"null")) or {})
    except msgspec.DecodeError:
        return piece  # not a reply of ours to understand
    details["cached_tokens"] = report.pulled_tokens + report.cached_tokens
    members["usage"] = {**usage, _DETAILS: details}
    return msgspec.json.encode(members)
