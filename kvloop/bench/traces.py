"""Reads recorded traces as scripts. Three forms, told apart by their content.

kvloop's own: JSON lines, one conversation a line.

    {"conversation": "c1", "start_seconds": 0.5,
     "prefix": {"name": "system", "tokens": 800},
     "turns": [{"message_tokens": 1200, "answer_tokens": 64},
               {"token_ids": [11, 12], "answer_tokens": 64, "pause_seconds": 3.5}]}

Only `turns` is required, and in a turn `answer_tokens` and one of `message_tokens` and
`token_ids`. Conversations with an equal `prefix` name begin with the same tokens.

Mooncake's: JSON lines, one request a line; see `mooncake`.

ShareGPT's: one JSON array, or JSON lines, of conversations of text; see `sharegpt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvloop.bench import mooncake, sharegpt
from kvloop.bench.scripts import Draw, Piece, Script, ScriptedTurn
from kvloop.bench.trace_lines import json_lines, refused

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class TraceFormat(StrEnum):
    """Forms that a trace may have."""

    AUTO = "auto"
    """Told by the content."""
    KVLOOP = "kvloop"
    MOONCAKE = "mooncake"
    SHAREGPT = "sharegpt"


class _Prefix(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    tokens: _Positive


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    answer_tokens: _Positive
    message_tokens: _Positive | None = None
    token_ids: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)] | None = None
    pause_seconds: _Seconds = 0.0


class _Conversation(msgspec.Struct, forbid_unknown_fields=True):
    turns: Annotated[tuple[_Turn, ...], msgspec.Meta(min_length=1)]
    conversation: str = ""
    start_seconds: _Seconds | None = None
    prefix: _Prefix | None = None


def read_trace(
    path: Path, form: TraceFormat = TraceFormat.AUTO, *, characters_per_token: float = 4.0
) -> list[Script]:
    """The conversations of a trace, in its order.

    Args:
        path: the file.
        form: its form.
        characters_per_token: how long a token is taken to be where there is only text.

    Raises:
        InvalidFieldError: the file does not have the form; names the line.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    match _form_of(content) if form is TraceFormat.AUTO else form:
        case TraceFormat.MOONCAKE:
            found = mooncake.scripts(content)
        case TraceFormat.SHAREGPT:
            found = sharegpt.scripts(content, characters_per_token)
        case _:
            found = list(_own(content))
    if not found:
        raise refused("the trace has no conversation with a message and an answer")
    return found


def _form_of(content: bytes) -> TraceFormat:
    """Told by the first object's members."""
    opened = content.lstrip()
    if opened.startswith(b"["):
        return TraceFormat.SHAREGPT
    first: dict[str, Any] = next(
        (members for _, members in json_lines(content, dict[str, Any])), {}
    )
    if "hash_ids" in first:
        return TraceFormat.MOONCAKE
    if "conversations" in first:
        return TraceFormat.SHAREGPT
    return TraceFormat.KVLOOP


def _own(content: bytes) -> Iterator[Script]:
    names: set[str] = set()
    for number, found in json_lines(content, _Conversation):
        name = found.conversation or f"line-{number}"
        if name in names:
            raise refused(f"conversation {name!r} comes twice", number)
        names.add(name)
        yield Script(name, tuple(_turns(name, number, found)), found.start_seconds)


def _turns(name: str, line: int, found: _Conversation) -> Iterator[ScriptedTurn]:
    for index, turn in enumerate(found.turns):
        pieces: list[Piece] = []
        if index == 0 and found.prefix is not None:
            pieces.append(Draw(f"prefix/{found.prefix.name}", 0, found.prefix.tokens))
        if (turn.message_tokens is None) == (turn.token_ids is None):
            raise refused("a turn has either message_tokens or token_ids", line)
        if turn.token_ids is not None:
            pieces.append(turn.token_ids)
        elif turn.message_tokens is not None:
            pieces.append(Draw(f"{name}/{index}", 0, turn.message_tokens))
        yield ScriptedTurn(tuple(pieces), turn.answer_tokens, turn.pause_seconds)
