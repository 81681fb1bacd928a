"""Items of the Responses API as messages of a history.

Both the `input` of a request and the `output` of an answer are lists of items;
the next request carries the answer's items in its input.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.common.history_digest import FunctionCall, Message, ToolCall

_CALLS = frozenset({"function_call", "custom_tool_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_NULL = msgspec.Raw(b"null")


class Item(msgspec.Struct, frozen=True):
    """The members of an item that the digest of a history covers."""

    type: str = "message"
    role: str = ""
    content: msgspec.Raw = _NULL
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    call_id: str | None = None
    output: msgspec.Raw = _NULL


_ITEM = msgspec.json.Decoder(Item)
_ITEMS = msgspec.json.Decoder(str | list[msgspec.Raw])


def message_of(raw: msgspec.Raw) -> Message | None:
    """The message that an item is; None for reasoning, which histories may leave out.

    Raises:
        msgspec.DecodeError: the item is not well formed.
    """
    item = _ITEM.decode(raw)
    if item.type == "reasoning":
        return None
    if item.type == "message":
        return Message(role=item.role, content=item.content)
    if item.type in _CALLS:
        called = FunctionCall(item.name, item.arguments if item.input is None else item.input)
        return Message(role="assistant", tool_calls=[ToolCall(called)])
    if item.type in _OUTPUTS:
        return Message(role="tool", content=item.output, tool_call_id=item.call_id)
    return Message(role=item.type, content=raw)


def messages_of(given: msgspec.Raw, instructions: str | None) -> Sequence[Message]:
    """The messages that the `input` and `instructions` of a request are.

    Raises:
        msgspec.DecodeError: the input is not well formed.
    """
    messages = [] if instructions is None else [_text("system", instructions)]
    items = _ITEMS.decode(given)
    if isinstance(items, str):
        return [*messages, _text("user", items)]
    found = [message_of(item) for item in items]
    return [*messages, *(message for message in found if message is not None)]


def _text(role: str, text: str) -> Message:
    return Message(role=role, content=msgspec.Raw(msgspec.json.encode(text)))
