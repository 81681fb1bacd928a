"""Prompts that are token ids, as JSON text.

A long prompt has tens of thousands of them, so they are never turned into Python
integers where their number is all that is wanted.
"""

from __future__ import annotations

import msgspec

_DIGITS = b"0123456789"
_MARKS = b" \t\r\n,"


def count_token_ids(text: bytes | msgspec.Raw) -> int | None:
    """How many ids an array holds; None if the text is no array of plain integers.

    Args:
        text: JSON text, or what is to become a part of some: what stands between the
            integers of an array is not checked, and cannot break out of it.
    """
    array = bytes(text).strip()
    if array.translate(None, _DIGITS + _MARKS) != b"[]":
        return None
    if not (array.startswith(b"[") and array.endswith(b"]")):
        return None
    return array.count(b",") + 1 if array[1:-1].strip() else 0
