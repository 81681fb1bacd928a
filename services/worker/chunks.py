"""What the sidecar must know of a stream chunk before it passes it on.

Nearly all chunks need no parsing: a few substring tests show that there is
nothing in them to act upon.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from services.worker import engine_errors
from services.worker.legs import KV_TRANSFER_PARAMS


@dataclass(frozen=True)
class Usage:
    """Token counts of a request as the engine reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct, frozen=True):
    """One stream chunk."""

    json: bytes
    """As the engine wrote it, less internal fields."""
    ends_answer: bool = False
    """True if a choice has its finish_reason."""
    usage: Usage | None = None
    """Token counts, if the chunk carries them."""
    only_usage: bool = False
    """True for the chunk that carries usage and no part of the answer."""


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _UsageJson(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _ChunkJson(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _UsageJson | None = None


class _ReplyJson(msgspec.Struct):
    usage: _UsageJson | None = None


_REPLY = msgspec.json.Decoder(_ReplyJson)
_CHUNK = msgspec.json.Decoder(_ChunkJson)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
INTERNAL_MEMBERS = (KV_TRANSFER_PARAMS, "ec_transfer_params")
"""What engines tell each other. Absent from what is passed on, null or not."""
INTERNAL_MARK = b'_transfer_params"'
"""Part of their names: a piece without it has none of them."""


def read_chunk(payload: bytes) -> Chunk:
    """Look at the data of one event of the engine's stream.

    Raises:
        KvloopError: the event is an error; the class fits the engine's status.
    """
    if INTERNAL_MARK in payload:
        payload = _without_params(payload)
    if b'"error"' in payload and (error := engine_errors.from_event(payload)) is not None:
        raise error
    if not (_may_end(payload) or _may_count(payload)):
        return Chunk(payload)
    try:
        chunk = _CHUNK.decode(payload)
    except msgspec.DecodeError:
        return Chunk(payload)  # not a chunk of ours to understand
    usage = None
    if chunk.usage is not None:
        usage = Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens or 0)
    return Chunk(
        payload,
        ends_answer=any(choice.finish_reason is not None for choice in chunk.choices),
        usage=usage,
        only_usage=usage is not None and not chunk.choices,
    )


def read_whole(reply: bytes) -> Chunk:
    """Look at a reply that came in one piece."""
    if INTERNAL_MARK in reply:
        reply = _without_params(reply)
    try:
        usage = _REPLY.decode(reply).usage
    except msgspec.DecodeError:
        usage = None  # not a reply of ours to understand
    return Chunk(
        reply,
        ends_answer=True,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens or 0) if usage else None,
    )


def _may_end(payload: bytes) -> bool:
    named = payload.count(b'"finish_reason"')
    return named != 0 and named != payload.count(b'"finish_reason":null')


def _may_count(payload: bytes) -> bool:
    return b'"usage"' in payload and b'"usage":null' not in payload


def _without_params(payload: bytes) -> bytes:
    """The JSON without internal members; every other value as it was."""
    try:
        members = _MEMBERS.decode(payload)
    except msgspec.DecodeError:
        return payload
    kept = {name: raw for name, raw in members.items() if name not in INTERNAL_MEMBERS}
    return payload if len(kept) == len(members) else msgspec.json.encode(kept)
