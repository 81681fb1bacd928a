"""A request's sequence, its blocks and its end, as both legs of the connector see them.

Runs inside vLLM: imports only the standard library, vLLM and siblings that do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from services.worker.proof import ExtraKeys

if TYPE_CHECKING:
    from vllm.v1.request import Request

DEADLINE = "remote_blocks_expiry_time"
"""In a handle: until when its blocks are kept, on the clock of the decode engine's host."""

Finish = Callable[[], tuple[bool, dict[str, Any] | None]]
"""NixlConnector's own way to end a request."""


def extra_keys(request: Request) -> ExtraKeys | None:
    """What besides tokens shapes the request's KV, as vLLM's own hashes see it."""
    spans = []
    if request.lora_request or request.cache_salt:
        spans.append((0, 1))
    for feature in request.mm_features or ():
        place = feature.mm_position
        spans.append((place.offset, place.offset + place.length))
    if getattr(request, "prompt_embeds", None) is not None:
        spans.append((0, request.num_prompt_tokens))
    if not spans:
        return None

    def keys(start: int, end: int) -> object:
        return generate_block_hash_extra_keys(request, start, end, 0)[0]

    return ExtraKeys(keys, spans)


def cut(block_ids: Sequence[Sequence[int]], num_tokens: int, block_size: int) -> list[list[int]]:
    """Each group's blocks that hold the first num_tokens tokens."""
    keep = -(-num_tokens // block_size)
    return [list(group[:keep]) for group in block_ids]


def count(block_ids: Sequence[Sequence[int]]) -> int:
    """Blocks in all groups."""
    return sum(len(group) for group in block_ids)
