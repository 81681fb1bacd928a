"""The name of a chat's history: a chain of digests over its messages.

A conversation without an id of its own is found again by what was said. The
router digests the messages of a request; the worker that generated the answer
appends it, and commits under the result. The next request carries that answer
in its history, so the router arrives at the same digest.

The digest finds a handle and proves nothing: what a prefill engine pulls is
decided by the digests of tokens. So the canonical form of a message is lenient
where clients are known to rewrite what they got, and keeps what tells
conversations apart:

- of every message its role and content, of tool calls name and arguments, and
  `name` and `tool_call_id`;
- content as text if it is text, in one part or several, without white space
  around it; null, "", no content and no parts are the same;
- an assistant's reasoning is left out, whether it came in a member of its own or
  in front of `</think>`;
- arguments of a call are compared as JSON values, if they are JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

DIGEST_BYTES = 32
DERIVED_ID_PREFIX = "h:"
"""Conversation ids that start so are derived from a history."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_END_OF_REASONING = "</think>"
_ENCODE = msgspec.json.Encoder(order="deterministic").encode


class FunctionCall(msgspec.Struct, frozen=True):
    """What a tool call calls."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """One entry of `tool_calls`."""

    function: FunctionCall | None = None


class Message(msgspec.Struct, frozen=True):
    """The members of a chat message that the digest covers."""

    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b"null")
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Sequence[ToolCall] | None = None


def start(*salts: str) -> bytes:
    """Digest of a history without messages.

    Args:
        salts: further facts in which equal histories can differ.
    """
    return hashlib.sha256(_ENCODE(["kvloop history 1", *salts])).digest()


def extend(digest: bytes, message: Message) -> bytes:
    """Digest of a history with one message more."""
    return hashlib.sha256(digest + _canonical(message)).digest()


def extend_all(digest: bytes, messages: Iterable[Message]) -> bytes:
    """Digest of a history with several messages more."""
    for message in messages:
        digest = extend(digest, message)
    return digest


def answer(content: str, calls: Sequence[tuple[str, str]] = ()) -> Message:
    """The message that an assistant's answer becomes in the history.

    Args:
        content: its text.
        calls: name and arguments of every tool call.
    """
    return Message(
        role="assistant",
        content=msgspec.Raw(msgspec.json.encode(content)),
        tool_calls=[ToolCall(FunctionCall(name, arguments)) for name, arguments in calls],
    )


def conversation_id(digest: bytes) -> str:
    """The conversation id that stands for a history."""
    return DERIVED_ID_PREFIX + digest.hex()


def _canonical(message: Message) -> bytes:
    content = _content(message.content)
    if message.role == "assistant" and isinstance(content, str):
        content = content.rpartition(_END_OF_REASONING)[2].strip()
    calls = [
        [call.function.name or "", _arguments(call.function.arguments or "")]
        for call in message.tool_calls or ()
        if call.function is not None
    ]
    return _ENCODE([message.role, content, message.name, message.tool_call_id, calls])


def _content(raw: msgspec.Raw) -> Any:
    """Text if it is text, the decoded parts otherwise."""
    content = msgspec.json.decode(raw)
    if isinstance(content, list):
        texts = [part.get("text") for part in content if _is_text(part)]
        if len(texts) != len(content):
            return content
        content = "\n".join(text for text in texts if isinstance(text, str))
    if content is None:
        return ""
    return content.strip() if isinstance(content, str) else content


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:
        return text
