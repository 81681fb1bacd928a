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
    code = (
        "import urllib.request; "
        f"print(urllib.request.urlopen('http://127.0.0.1:{_PORT}/metrics').read().decode())"
    )
    lines = [
        line
        for container in stack.containers(stack.prefill)
        for line in stack.python(container, code).splitlines()
    ]
    pulled = [line for line in lines if line.startswith(name) and label in line]
    return round(sum(float(line.split()[-1]) for line in pulled))
