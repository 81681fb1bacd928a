"""Typed chat messages and tools as members of an OpenAI body."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvloop.errors import InvalidFieldError
from kvloop.router.v1 import router_pb2
from services.router.body import decode, parse_object

_ROLES = ("system", "developer", "user", "assistant", "tool")


class _Part(msgspec.Struct):
    """One entry of a message's content; what follows `type` is the engine's affair."""

    type: str


_PARTS = msgspec.json.Decoder(list[_Part])


def openai_messages(messages: Iterable[router_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """The `messages` array, opaque parts verbatim.

    Raises:
        InvalidFieldError: there is none, or one is not well formed.
    """
    built = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not built:
        raise InvalidFieldError("messages is empty; a turn needs at least one", field="messages")
    return built


def openai_tools(tools: Iterable[router_pb2.Tool]) -> list[dict[str, Any]]:
    """The `tools` array, parameter schemas verbatim.

    Raises:
        InvalidFieldError: a tool has no name or its schema is not a JSON object.
    """
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _message(message: router_pb2.ChatMessage, path: str) -> dict[str, Any]:
    _check_role_fields(message, path)
    built: dict[str, Any] = {"role": message.role, "content": _content(message, path)}
    if message.name:
        built["name"] = message.name
    if message.tool_call_id:
        built["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        built["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    if message.HasField("reasoning_content"):
        built["reasoning_content"] = message.reasoning_content
    if message.extra_json:
        extra_path = f"{path}.extra_json"
        for name, raw in parse_object(message.extra_json, extra_path).items():
            if name in built:
                raise InvalidFieldError(
                    f"{extra_path}.{name} is set by a typed field too", field=f"{extra_path}.{name}"
                )
            built[name] = raw
    return built


def _check_role_fields(message: router_pb2.ChatMessage, path: str) -> None:
    role = message.role
    if role not in _ROLES:
        raise InvalidFieldError(
            f"{path}.role must be one of {', '.join(_ROLES)}", field=f"{path}.role"
        )
    if role == "tool" and not message.tool_call_id:
        raise _missing(f"{path}.tool_call_id", "a tool message answers one call")
    if role != "tool" and message.tool_call_id:
        raise _misplaced(f"{path}.tool_call_id", "tool")
    if role != "assistant" and message.tool_calls:
        raise _misplaced(f"{path}.tool_calls", "assistant")
    if role != "assistant" and message.HasField("reasoning_content"):
        raise _misplaced(f"{path}.reasoning_content", "assistant")


def _content(message: router_pb2.ChatMessage, path: str) -> str | msgspec.Raw | None:
    if message.content_parts_json:
        parts_path = f"{path}.content_parts_json"
        if message.HasField("content"):
            raise InvalidFieldError(
                f"{parts_path} excludes {path}.content; set one of them", field=parts_path
            )
        if not decode(message.content_parts_json, _PARTS, parts_path):
            raise _missing(parts_path, "it has no parts")
        return msgspec.Raw(message.content_parts_json)
    if message.HasField("content"):
        return message.content
    # An assistant message may hold calls, reasoning or a refusal in its place.
    said = message.tool_calls or message.HasField("reasoning_content") or message.extra_json
    if message.role != "assistant" or not said:
        raise _missing(f"{path}.content", "the message says nothing")
    return None


def _tool_call(call: router_pb2.ToolCall, path: str) -> dict[str, Any]:
    if not call.id:
        raise _missing(f"{path}.id", "its answer refers to it")
    if not call.name:
        raise _missing(f"{path}.name", "it names the function")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_json},
    }


def _tool(tool: router_pb2.Tool, path: str) -> dict[str, Any]:
    if not tool.name:
        raise _missing(f"{path}.name", "it names the function")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        parse_object(tool.parameters_json, f"{path}.parameters_json")
        function["parameters"] = msgspec.Raw(tool.parameters_json)
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _missing(path: str, why: str) -> InvalidFieldError:
    return InvalidFieldError(f"{path} is missing: {why}", field=path)


def _misplaced(path: str, role: str) -> InvalidFieldError:
    return InvalidFieldError(f"{path} belongs to role {role!r} only", field=path)
