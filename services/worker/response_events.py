"""What the sidecar must know of /v1/responses: its events, its replies, its answers.

An event has its type in a member of the data, and the answer so far in the member
`response` of the first and of the last ones. A reply in one piece is that member.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.common import history_digest
from services.common.response_items import message_of
from services.worker import engine_errors
from services.worker.chunks import INTERNAL_MARK, INTERNAL_MEMBERS, Chunk, Usage

_LAST = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""Types of the event that ends an answer."""


class _UsageJson(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0


class _Response(msgspec.Struct):
    usage: _UsageJson | None = None


class _Event(msgspec.Struct):
    type: str = ""
    response: _Response | None = None


class _Output(msgspec.Struct):
    output: list[msgspec.Raw] = []


class _Answered(msgspec.Struct):
    response: _Output | None = None


_REPLY = msgspec.json.Decoder(_Response)
_EVENT = msgspec.json.Decoder(_Event)
_OUTPUT = msgspec.json.Decoder(_Output)
_ANSWERED = msgspec.json.Decoder(_Answered)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_event(payload: bytes) -> Chunk:
    """Look at the data of one event of a stream.

    Raises:
        KvloopError: the event is an error in the form of the other endpoints.
    """
    if INTERNAL_MARK in payload:
        payload = _without_params(payload)
    if b'"response"' not in payload and b'"error"' not in payload:
        return Chunk(payload)
    try:
        event = _EVENT.decode(payload)
    except msgspec.DecodeError:
        return Chunk(payload)  # not an event of ours to understand
    if not event.type and (error := engine_errors.from_event(payload)) is not None:
        raise error
    return Chunk(payload, ends_answer=event.type in _LAST, usage=_usage(event.response))


def read_whole(reply: bytes) -> Chunk:
    """Look at a reply that came in one piece."""
    if INTERNAL_MARK in reply:
        reply = _without_params(reply)
    try:
        usage = _usage(_REPLY.decode(reply))
    except msgspec.DecodeError:
        usage = None  # not a reply of ours to understand
    return Chunk(reply, ends_answer=True, usage=usage)


class ResponseReader:
    """Finds the answer among events, or in a whole reply. See `answer.AnswerReader`."""

    def __init__(self) -> None:
        self._items: list[msgspec.Raw] = []
        self._readable = True

    def add(self, piece: bytes) -> None:
        """Take in one event, or the whole reply."""
        if b'"output"' not in piece:
            return
        try:
            answered = _ANSWERED.decode(piece).response or _OUTPUT.decode(piece)
        except msgspec.DecodeError:
            self._readable = False
            return
        if answered.output:
            self._items = answered.output

    def messages(self) -> list[history_digest.Message] | None:
        """The items of the answer; None if a piece could not be read."""
        if not self._readable:
            return None
        found = [message_of(item) for item in self._items]
        return [message for message in found if message is not None]


def _usage(response: _Response | None) -> Usage | None:
    if response is None or response.usage is None:
        return None
    return Usage(response.usage.input_tokens, response.usage.output_tokens)


def _without_params(payload: bytes) -> bytes:
    """The JSON without internal members, in itself and in its `response`."""
    try:
        members: dict[str, Any] = dict(_MEMBERS.decode(payload))
        kept = _kept(members)
        if "response" in kept:
            response = _MEMBERS.decode(kept["response"])
            kept["response"] = _kept(response)
            unchanged = len(kept["response"]) == len(response)
        else:
            unchanged = True
    except msgspec.DecodeError:
        return payload
    return payload if unchanged and len(kept) == len(members) else msgspec.json.encode(kept)


def _kept(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: raw for name, raw in members.items() if name not in INTERNAL_MEMBERS}
