"""One piece of an answer, as the engine wrote it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvloop.errors import InternalError


class FunctionDelta(msgspec.Struct, frozen=True):
    """Part of a function call."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True):
    """Part of a tool call; parts with the same index belong together."""

    index: int = 0
    id: str | None = None
    function: FunctionDelta | None = None


class Delta(msgspec.Struct, frozen=True):
    """What a chat chunk adds to a choice.

    Engines name reasoning `reasoning_content` (older vLLM) or `reasoning`.
    """

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChoiceDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to one of the answer's choices.

    Attributes:
        index: number of the choice; 0 unless `n` was above 1.
        delta: set in chat chunks.
        text: set in completion chunks.
        finish_reason: why the choice ended; None while it goes on.
        token_ids: ids of the new tokens, if `return_token_ids` was asked for.
        prompt_token_ids: the prompt's ids, in completions that asked for them.
    """

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Body(msgspec.Struct, frozen=True):
    choices: list[ChoiceDelta] = []
    prompt_token_ids: list[int] | None = None


_decode = msgspec.json.Decoder(_Body).decode


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of an answer.

    Attributes:
        json: the OpenAI chunk, as the engine wrote it. Members that have no
            attribute here, such as logprobs, are found in it.
        choices: what it adds, by choice.
        prompt_token_ids: the prompt's ids, if asked for, in the first chunk.
    """

    json: bytes
    choices: tuple[ChoiceDelta, ...]
    prompt_token_ids: tuple[int, ...] | None

    @property
    def text(self) -> str:
        """Text that the chunk adds to the first choice; "" if none."""
        for choice in self.choices:
            if choice.index == 0:
                return choice.text or (choice.delta.content if choice.delta else None) or ""
        return ""


def parse_chunk(chunk: bytes) -> Chunk:
    """Read the JSON of one chunk.

    Raises:
        InternalError: it is not an OpenAI stream chunk.
    """
    try:
        body = _decode(chunk)
    except msgspec.DecodeError as error:
        raise InternalError(f"the engine's chunk cannot be read: {error}") from error
    ids = body.prompt_token_ids
    for choice in body.choices:
        ids = ids or choice.prompt_token_ids
    return Chunk(
        json=chunk,
        choices=tuple(body.choices),
        prompt_token_ids=tuple(ids) if ids is not None else None,
    )
