"""Server-sent events as vLLM frames them."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
"""Ends every stream."""


def event(data: bytes) -> bytes:
    """One event.

    Args:
        data: what the engine wrote; a line break in it starts another data line,
            as it did there.
    """
    if b"\n" in data:
        data = data.replace(b"\n", b"\ndata: ")
    return b"data: " + data + b"\n\n"
