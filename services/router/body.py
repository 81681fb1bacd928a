"""JSON text that kvloop looks into without rewriting it.

Members of an OpenAI body stay `msgspec.Raw`: their integers, number formats,
key order and escapes reach the engine as the caller wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvloop.errors import InvalidFieldError

_T = TypeVar("_T")

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
# msgspec ends its messages with the place of the fault: "... - at `$[0].type`".
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<place>[^`]*)`)?$", re.DOTALL)


@dataclass(frozen=True)
class Member:
    """One member of a request body and where the caller wrote it."""

    raw: msgspec.Raw
    """The value, byte for byte."""
    path: str
    """Path of the field in the caller's request, for error messages."""


class Span(NamedTuple):
    """A range of bytes."""

    start: int
    end: int


def member(value: object, path: str) -> Member:
    """A member made from a typed field. `msgspec.Raw` inside stays verbatim."""
    return Member(msgspec.Raw(msgspec.json.encode(value)), path)


def parse_object(data: bytes, path: str) -> dict[str, msgspec.Raw]:
    """The members of a JSON object, values untouched.

    Args:
        data: JSON text.
        path: field it came in, for the error.

    Raises:
        InvalidFieldError: not UTF-8, not JSON, or not an object.
    """
    return decode(data, _OBJECT, path)


def decode(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[_T], path: str) -> _T:
    """Decode JSON text, with every fault blamed on its field.

    Raises:
        InvalidFieldError: not UTF-8, not JSON, or not what the decoder wants.
    """
    try:
        if isinstance(data, bytes):
            data.decode()  # msgspec does not look into strings that it skips
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise InvalidFieldError(f"{path} is not valid UTF-8", field=path) from error
    except msgspec.ValidationError as error:
        what, place = _split(str(error))
        raise InvalidFieldError(f"{path}{place}: {what}", field=f"{path}{place}") from error
    except msgspec.DecodeError as error:
        raise InvalidFieldError(f"{path} is not valid JSON: {error}", field=path) from error
    except RecursionError as error:
        raise InvalidFieldError(f"{path} is nested too deeply", field=path) from error


def encode(members: dict[str, Any]) -> bytes:
    """One JSON object; `msgspec.Raw` values are copied byte for byte."""
    return msgspec.json.encode(members)


def place_of(members: Mapping[str, msgspec.Raw], name: str) -> Span | None:
    """Where a member's value lies in what `encode` makes of the members."""
    at = len(b"{")
    for other, raw in members.items():
        at += len(msgspec.json.encode(other)) + len(b":")
        size = memoryview(raw).nbytes
        if other == name:
            return Span(at, at + size)
        at += size + len(b",")
    return None


def _split(message: str) -> tuple[str, str]:
    """What is wrong, and the place below the decoded value: "" or ".a[0]"."""
    match = _PLACE.match(message)
    if match is None:
        return message, ""
    return match["what"].lower(), match["place"] or ""
