"""ChatML, with tools: how messages become a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.sim.api_errors import ApiError
from services.sim.tokenizer import (
    END_OF_TOOL_CALL,
    END_OF_TURN,
    START_OF_TURN,
    TOOL_CALL,
)

Message = Mapping[str, Any]


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The prompt text of a chat.

    Args:
        messages: the conversation.
        tools: functions that the model may call.
        add_generation_prompt: begin the assistant's turn.
        continue_final_message: leave the last message open instead.

    Raises:
        ApiError: there is no message, or one is malformed.
    """
    if not messages:
        raise ApiError("list index out of range")
    turns = []
    if tools:
        listed = "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
        turns.append(
            f"{START_OF_TURN}system\nYou may call these functions:\n{listed}{END_OF_TURN}\n"
        )
    turns += [_turn(message) for message in messages]
    if continue_final_message:
        turns[-1] = turns[-1].removesuffix(f"{END_OF_TURN}\n")
    elif add_generation_prompt:
        turns.append(f"{START_OF_TURN}assistant\n")
    return "".join(turns)


def tool_call_text(name: str, arguments: str) -> str:
    """How the model writes a tool call, and how the template repeats it."""
    return f"{tool_call_start(name)}{arguments}{tool_call_end()}"


def tool_call_start(name: str) -> str:
    """What comes before the arguments of a tool call."""
    return f'{TOOL_CALL}\n{{"name": {json.dumps(name)}, "arguments": '


def tool_call_end() -> str:
    """What comes after the arguments of a tool call."""
    return f"}}\n{END_OF_TOOL_CALL}"


def _turn(message: Message) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise ApiError("each message needs a role", param="messages")
    parts = [_text(message.get("content"))]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {}) if isinstance(call, dict) else {}
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        parts.append(tool_call_text(str(function.get("name", "")), arguments))
    return f"{START_OF_TURN}{role}\n{''.join(parts)}{END_OF_TURN}\n"


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError("message content must be a string or a list of parts", param="messages")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") in ("text", "input_text", "refusal"):
            texts.append(str(part.get("text", part.get("refusal", ""))))
        else:
            kind = part.get("type", "part") if isinstance(part, dict) else "part"
            name = str(kind).removesuffix("_url").removeprefix("input_")
            raise ApiError(f"At most 0 {name}(s) may be provided in one prompt.")
    return "\n".join(texts)
