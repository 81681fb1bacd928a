"""Chat messages and tools, as Python values and as protobuf messages.

Both sides of a conversation use `Message`: it is what a caller sends and what
`Completion.message` gives back for the history. Dicts in OpenAI's format are
accepted wherever a `Message` is; nothing in them is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from kvloop.errors import InvalidFieldError
from kvloop.router.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an assistant message made.

    Attributes:
        id: the tool message that answers repeats it in `tool_call_id`.
        name: function called.
        arguments: JSON text as the model wrote it; it may be invalid.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation's history.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool".
        content: text, or a list of content parts in OpenAI's format. None and
            "" differ, as null and "" do in JSON.
        name: participant name.
        tool_call_id: for role "tool", the id of the call this answers.
        tool_calls: for role "assistant", the calls made.
        reasoning_content: for role "assistant", reasoning to keep in history.
        extra: any other member of the OpenAI message.
    """

    role: str
    content: str | Sequence[Mapping[str, Any]] | None = None
    name: str = ""
    tool_call_id: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_content: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def encode_json(value: object, path: str) -> bytes:
    """JSON bytes of a value.

    Raises:
        InvalidFieldError: it holds something that JSON has no form for.
    """
    try:
        return msgspec.json.encode(value)
    except TypeError as error:
        raise InvalidFieldError(f"{path} cannot be written as JSON: {error}", field=path) from error


def to_chat_message(value: Message | Mapping[str, Any], path: str) -> router_pb2.ChatMessage:
    """The protobuf message for one history entry.

    Args:
        value: the entry.
        path: where it stands in the request, such as "messages[2]", for errors.

    Raises:
        InvalidFieldError: a member has the wrong type.
    """
    if not isinstance(value, Message):
        value = _from_openai(value, path)
    made = router_pb2.ChatMessage(role=value.role, name=value.name, tool_call_id=value.tool_call_id)
    if isinstance(value.content, str):
        made.content = value.content
    elif value.content is not None:
        made.content_parts_json = encode_json(value.content, f"{path}.content")
    if value.reasoning_content is not None:
        made.reasoning_content = value.reasoning_content
    for call in value.tool_calls:
        made.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments)
    if value.extra:
        made.extra_json = encode_json(value.extra, path)
    return made


def to_tool(value: Mapping[str, Any], path: str) -> router_pb2.Tool:
    """The protobuf message for one tool in OpenAI's format.

    Raises:
        InvalidFieldError: it is not of type "function" or has a member of the
            wrong type or one that is not known.
    """
    if not isinstance(value, Mapping) or value.get("type") != "function":
        raise InvalidFieldError(f'{path}.type must be "function"', field=f"{path}.type")
    rest = dict(_typed(value, "function", dict, path) or {})
    path = f"{path}.function"
    made = router_pb2.Tool(name=_typed(rest, "name", str, path) or "")
    made.description = _typed(rest, "description", str, path) or ""
    parameters = _typed(rest, "parameters", dict, path)
    if parameters is not None:
        made.parameters_json = encode_json(parameters, f"{path}.parameters")
    strict = _typed(rest, "strict", bool, path)
    if strict is not None:
        made.strict = strict
    unknown = set(rest) - {"name", "description", "parameters", "strict"}
    if unknown:
        name = min(unknown)
        raise InvalidFieldError(f"{path}.{name} is not known", field=f"{path}.{name}")
    return made


_KNOWN = {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content"}


def _from_openai(value: Mapping[str, Any], path: str) -> Message:
    if not isinstance(value, Mapping):
        raise InvalidFieldError(f"{path} must be a dict or a Message", field=path)
    content = value.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        raise InvalidFieldError(
            f"{path}.content must be a string, a list of parts or null", field=f"{path}.content"
        )
    calls = _typed(value, "tool_calls", list, path) or ()
    return Message(
        role=_typed(value, "role", str, path) or "",
        content=content,
        name=_typed(value, "name", str, path) or "",
        tool_call_id=_typed(value, "tool_call_id", str, path) or "",
        tool_calls=tuple(
            _tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)
        ),
        reasoning_content=_typed(value, "reasoning_content", str, path),
        extra={name: member for name, member in value.items() if name not in _KNOWN},
    )


def _tool_call(value: Mapping[str, Any], path: str) -> ToolCall:
    if not isinstance(value, Mapping) or value.get("type", "function") != "function":
        raise InvalidFieldError(f'{path} must be a call of type "function"', field=path)
    function = _typed(value, "function", dict, path) or {}
    return ToolCall(
        id=_typed(value, "id", str, path) or "",
        name=_typed(function, "name", str, f"{path}.function") or "",
        arguments=_typed(function, "arguments", str, f"{path}.function") or "",
    )


_T = TypeVar("_T")
_WORDS: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def _typed(value: Mapping[str, Any], name: str, kind: type[_T], path: str) -> _T | None:
    member = value.get(name)
    if member is not None and not isinstance(member, kind):
        raise InvalidFieldError(f"{path}.{name} must be {_WORDS[kind]}", field=f"{path}.{name}")
    return member
