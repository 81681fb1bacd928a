"""Recognises a conversation without an id by what its request carries.

A chat is recognised by its messages, a response by its items: the answer that
ended the last turn can be told from what followed it. In the prompt of a
completion it cannot, so there the beginning of the prompt is what counts. See
docs/adr/0020 and 0021.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from services.common import history_digest
from services.common.history_digest import Message
from services.common.response_items import messages_of

_MESSAGES = msgspec.json.Decoder(list[Message])
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

BEGINNING_ID_PREFIX = "b:"
"""Conversation ids that start so are derived from the beginning of a prompt."""
_LEAST_CHARACTERS = 1024
_LEAST_TOKENS = 256


@dataclass(frozen=True)
class History:
    """What names a conversation that has no id."""

    digest: bytes
    """Of all messages of the request. With the answer it names the next turn."""
    answers: int
    """Answers in the history; of one answer there may be several messages."""
    conversation_id: str
    """Under which the turn that gave the last of these answers was committed;
    empty if there are none."""


def read_history(messages: msgspec.Raw, cache_salt: str | None) -> History | None:
    """The history in the `messages` of a chat; None if they are not well formed.

    Args:
        messages: JSON text.
        cache_salt: the caller's own; equal histories under two salts share no KV.
    """
    try:
        return _history(_MESSAGES.decode(messages), cache_salt)
    except _UNREADABLE:
        return None  # for the engine to judge


def read_input(
    given: msgspec.Raw, instructions: str | None, cache_salt: str | None
) -> History | None:
    """The history in the `input` of a response; None if it is not well formed.

    Args:
        given: JSON text.
        instructions: which come before the input.
        cache_salt: as for `read_history`.
    """
    try:
        return _history(messages_of(given, instructions), cache_salt)
    except _UNREADABLE:
        return None


def beginning_id(prompt: str | Sequence[int], cache_salt: str | None) -> str:
    """The conversation id that stands for all prompts with this beginning.

    The beginning is the largest power of two of characters, or of token ids, that
    the prompt fills: at least half of it. So a prompt that grows keeps its id
    until it has doubled, and two that part in their first half have two ids.

    Args:
        prompt: text or token ids.
        cache_salt: as for `read_history`.

    Returns:
        An id; empty for a prompt that is too short to be worth one.
    """
    least = _LEAST_CHARACTERS if isinstance(prompt, str) else _LEAST_TOKENS
    if len(prompt) < least:
        return ""
    size = 1 << (len(prompt).bit_length() - 1)
    known = ["kvloop beginning 1", cache_salt, size, prompt[:size]]
    return BEGINNING_ID_PREFIX + hashlib.sha256(msgspec.json.encode(known)).hexdigest()


def _history(messages: Iterable[Message], cache_salt: str | None) -> History:
    digest = history_digest.start(*([] if cache_salt is None else [cache_salt]))
    conversation_id, answers, before = "", 0, ""
    for message in messages:
        digest = history_digest.extend(digest, message)
        if message.role == "assistant":
            answers += before != "assistant"
            conversation_id = history_digest.conversation_id(digest)
        before = message.role
    return History(digest, answers, conversation_id)
