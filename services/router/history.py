"""Recognises a conversation without an id by the history that a request carries."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from services.common import history_digest
from services.common.history_digest import Message

_MESSAGES = msgspec.json.Decoder(list[Message])


@dataclass(frozen=True)
class History:
    """What names a conversation that has no id."""

    digest: bytes
    """Of all messages of the request. With the answer it names the next turn."""
    answers: int
    """Assistant messages in the history."""
    conversation_id: str
    """Under which the turn that gave the last of these answers was committed;
    empty if there are none."""


def read_history(messages: msgspec.Raw, cache_salt: str | None) -> History | None:
    """The history in the `messages` of a request; None if they are not well formed.

    Args:
        messages: JSON text.
        cache_salt: the caller's own; equal histories under two salts share no KV.
    """
    digest = history_digest.start(*([] if cache_salt is None else [cache_salt]))
    conversation_id, answers = "", 0
    try:
        for message in _MESSAGES.decode(messages):
            digest = history_digest.extend(digest, message)
            if message.role == "assistant":
                answers += 1
                conversation_id = history_digest.conversation_id(digest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # for the engine to judge
    return History(digest, answers, conversation_id)
