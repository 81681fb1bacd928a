"""What the engines say of themselves, whatever kvloop says of them."""

from __future__ import annotations

from tests.compose.stack import Stack

_PORT = 8100
_COUNTERS = {
    "prefill": ("vllm:external_prefix_cache_hits_total", ""),
    "prefill-cpu": ("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"'),
}
"""Name of the counter, and a label that its series has, by service."""


def pulled_tokens(stack: Stack) -> int:
    """Tokens that the prefill engines have pulled so far, by vLLM's own counter."""
    name, label = _COUNTERS[stack.prefill]
    containers = stack.containers(stack.prefill)
    return round(sum(stack.counted(each, _PORT, name, label) for each in containers))
