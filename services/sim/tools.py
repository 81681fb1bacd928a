"""Tool calls: written by the simulated model when tool_choice demands one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from services.sim.api_errors import invalid_combination
from services.sim.api_requests import ChatRequest
from services.sim.chat_template import tool_call_end, tool_call_start, tool_call_text
from services.sim.sequence import Grammar
from services.sim.tokenizer import EOS_ID, Tokenizer
from services.sim.vocabulary import WORDS


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call in a stream."""

    name: str | None
    """Set in the first piece."""
    arguments: str


def demanded_function(request: ChatRequest) -> Mapping[str, Any] | None:
    """The function that the answer must call; None: the answer is text.

    With tool_choice "required" it is the first one. With "auto" the simulated
    model never calls.

    Raises:
        ApiError: tool_choice names no function of the request.
    """
    choice = request.tool_choice
    functions = [tool.get("function", {}) for tool in request.tools or ()]
    if choice == "required":
        return dict(functions[0])
    if not isinstance(choice, dict):
        return None
    name = (choice.get("function") or {}).get("name")
    for function in functions:
        if function.get("name") == name:
            return dict(function)
    raise invalid_combination(
        "The tool specified in `tool_choice` does not match any of the specified `tools`",
        "tool_choice",
    )


def tool_grammar(function: Mapping[str, Any], tokenizer: Tokenizer) -> Grammar:
    """Makes the tokens of a call whose arguments depend on the prompt's KV."""

    def write(digest: bytes) -> Sequence[int]:
        arguments = json.dumps(_arguments(function.get("parameters") or {}, digest))
        text = tool_call_text(str(function.get("name", "")), arguments)
        return [*tokenizer.encode(text), EOS_ID]

    return write


def call_id() -> str:
    """A new id of a tool call, in vLLM's form."""
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


class ToolCallReader:
    """Takes a tool call apart while it is written.

    Args:
        name: the function that is called.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = tool_call_start(name)
        self._end = tool_call_end()
        self._text = ""
        self._sent = 0
        self._named = False

    def add(self, text: str, *, finished: bool) -> ToolCallDelta | None:
        """Take in text; give out what is new of the call, if anything is.

        The end is held back until it is known to be arguments or the closing tag.
        """
        self._text += text
        stop = len(self._text)
        if self._text.endswith(self._end):
            stop -= len(self._end)
        elif not finished:
            stop -= len(self._end)
        arguments = self._text[len(self._start) : stop] if stop > len(self._start) else ""
        new = arguments[self._sent :]
        self._sent += len(new)
        name = None
        if not self._named and len(self._text) >= len(self._start):
            name, self._named = self._name, True
        return ToolCallDelta(name, new) if new or name is not None else None


def _arguments(schema: Mapping[str, Any], digest: bytes) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    return {
        str(name): _value(definition if isinstance(definition, dict) else {}, digest, str(name))
        for name, definition in properties.items()
    }


def _value(definition: Mapping[str, Any], digest: bytes, name: str) -> object:
    drawn = int.from_bytes(blake2b(digest + name.encode(), digest_size=4).digest(), "little")
    if options := definition.get("enum"):
        return options[drawn % len(options)]
    match definition.get("type"):
        case "string":
            return WORDS[drawn % len(WORDS)]
        case "integer":
            return drawn % 1000
        case "number":
            return drawn % 1000 / 10
        case "boolean":
            return bool(drawn % 2)
        case "array":
            return []
        case "object":
            return _arguments(definition, digest)
        case _:
            return None
