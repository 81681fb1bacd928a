"""Tells OpenAI clients in `usage` what the receipt tells gRPC clients.

`usage.prompt_tokens_details.cached_tokens` is the number of prompt tokens that
were not computed for this request; in responses it is named
`input_tokens_details`. The decode engine cannot know it: to it all of a
handed-over prompt is cached.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvloop.common.v1 import common_pb2

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OPTIONAL_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_DETAILS = {
    common_pb2.API_CHAT_COMPLETIONS: "prompt_tokens_details",
    common_pb2.API_COMPLETIONS: "prompt_tokens_details",
    common_pb2.API_RESPONSES: "input_tokens_details",
}


def with_cached_tokens(
    api: common_pb2.Api.ValueType, piece: bytes, report: common_pb2.PrefillReport
) -> bytes:
    """A chunk or a whole reply with that member set; every other value as it was.

    Args:
        api: endpoint that it came from.
        piece: JSON as the engine wrote it. Without usage it stays the same.
        report: what the prefill engine did with the prompt.
    """
    if b'"usage"' not in piece or b'"usage":null' in piece:
        return piece
    cached = report.pulled_tokens + report.cached_tokens
    try:
        members: dict[str, Any] = dict(_MEMBERS.decode(piece))
        if api == common_pb2.API_RESPONSES and "response" in members:  # an event
            response: dict[str, Any] = dict(_MEMBERS.decode(members["response"]))
            members["response"] = response
            changed = _tell(response, _DETAILS[api], cached)
        else:
            changed = _tell(members, _DETAILS[api], cached)
    except msgspec.DecodeError:
        return piece  # not a reply of ours to understand
    return msgspec.json.encode(members) if changed else piece


def _tell(members: dict[str, Any], details_name: str, cached: int) -> bool:
    """Set the member in the `usage` among these; False if there is no usage."""
    usage = _OPTIONAL_MEMBERS.decode(members.get("usage", b"null"))
    if usage is None:
        return False
    details: dict[str, Any] = dict(_OPTIONAL_MEMBERS.decode(usage.get(details_name, b"null")) or {})
    details["cached_tokens"] = cached
    members["usage"] = {**usage, details_name: details}
    return True
