"""Reads JSON lines with errors that name the line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from kvloop.errors import InvalidFieldError

_T = TypeVar("_T")


def json_lines(content: bytes, kind: type[_T]) -> Iterator[tuple[int, _T]]:
    """Every line that is not empty, with its number from 1.

    Args:
        content: of the file.
        kind: what each line must hold.

    Raises:
        InvalidFieldError: a line holds something else.
    """
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise refused(str(error), number) from error


def refused(why: str, line: int | None = None) -> InvalidFieldError:
    """The error for a trace that cannot be used."""
    place = "" if line is None else f"line {line}: "
    return InvalidFieldError(f"{place}{why}", field="trace")
