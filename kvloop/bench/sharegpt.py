"""Traces in ShareGPT's form: conversations of text, without times.

    [{"id": "c1", "conversations": [{"from": "human", "value": "..."},
                                    {"from": "gpt", "value": "..."}, ...]}, ...]

Only lengths are taken from the text: a turn is what the user said (and what the system
said before) and the length of the answer. Tokens are random, so that no tokenizer is
needed and nothing of the text reaches an engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from kvloop.bench.scripts import Draw, Script, ScriptedTurn
from kvloop.bench.trace_lines import json_lines, refused

_ANSWERS = frozenset({"gpt", "assistant", "chatgpt", "bard", "bing"})


class _Said(msgspec.Struct):
    who: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: tuple[_Said, ...]
    id: str | int | None = None


def scripts(content: bytes, characters_per_token: float) -> list[Script]:
    """The conversations that have at least one message with an answer.

    Args:
        content: a JSON array, or JSON lines.
        characters_per_token: how long a token is taken to be.

    Raises:
        InvalidFieldError: the content has another form.
    """
    if characters_per_token <= 0:
        raise refused("characters per token are more than 0")
    found = []
    for number, conversation in _conversations(content):
        name = f"{number}-{conversation.id}" if conversation.id is not None else str(number)
        turns = tuple(_turns(name, conversation, characters_per_token))
        if turns:
            found.append(Script(name, turns))
    return found


def _conversations(content: bytes) -> Iterator[tuple[int, _Conversation]]:
    if not content.lstrip().startswith(b"["):
        yield from json_lines(content, _Conversation)
        return
    try:
        yield from enumerate(msgspec.json.decode(content, type=list[_Conversation]), 1)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refused(str(error)) from error


def _turns(name: str, conversation: _Conversation, per_token: float) -> Iterator[ScriptedTurn]:
    asked = answered = 0  # characters of the turn at hand
    number = 0

    def turn() -> ScriptedTurn:
        message = Draw(f"{name}/{number}", 0, math.ceil(asked / per_token))
        return ScriptedTurn((message,), math.ceil(answered / per_token))

    for said in conversation.conversations:
        if said.who in _ANSWERS:
            answered += len(said.value) if asked else 0  # answers to nothing are left out
            continue
        if answered:
            yield turn()
            number, asked, answered = number + 1, 0, 0
        asked += len(said.value)
    if answered:
        yield turn()
