"""Traces in Mooncake's form: requests with times, lengths, and ids of prefix blocks.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

The timestamp is in milliseconds. Each hash id stands for a block of 512 tokens together
with all blocks before it; the last may be incomplete. Equal ids give equal random tokens,
so shared prefixes stay shared.

The trace does not say which requests belong to one conversation. A request is taken for the
next turn of an earlier one if it begins with all complete blocks of that one's prompt and is
long enough for its answer. Blocks after which requests part (a system prompt, say) name no
conversation. In a next turn the answer that was generated takes the place of the recorded
one, of which only the length is known.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from kvloop.bench.scripts import Draw, Script, ScriptedTurn
from kvloop.bench.trace_lines import json_lines, refused

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for."""

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Request(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Positive
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: tuple[int, ...]

    @property
    def answer_tokens(self) -> int:
        """Tokens to generate: a request without an answer gets one."""
        return max(self.output_length, 1)

    @property
    def complete(self) -> tuple[int, ...]:
        """Ids of its complete blocks."""
        return self.hash_ids[: self.input_length // BLOCK_TOKENS]

    def pieces(self, start: int) -> tuple[Draw, ...]:
        """The prompt's tokens from a place on, by block."""
        found = []
        for index in range(start // BLOCK_TOKENS, len(self.hash_ids)):
            begin = index * BLOCK_TOKENS
            skipped = max(start - begin, 0)
            count = min(BLOCK_TOKENS, self.input_length - begin) - skipped
            if count > 0:
                found.append(Draw(f"block/{self.hash_ids[index]}", skipped, count))
        return tuple(found)


@dataclass
class _Thread:
    """A conversation as far as it has been read."""

    name: str
    last: _Request
    turns: list[ScriptedTurn] = field(default_factory=list)

    def goes_on_with(self, request: _Request) -> bool:
        """True if the request has room for the last answer and a message behind it."""
        return request.input_length > self.last.input_length + self.last.answer_tokens

    def add(self, request: _Request, start: int, began: float) -> None:
        """Take the request as the next turn, whose own tokens begin at a place."""
        at = (request.timestamp - began) / 1e3
        self.turns.append(ScriptedTurn(request.pieces(start), request.answer_tokens, at_seconds=at))
        self.last = request


def scripts(content: bytes) -> list[Script]:
    """The trace's conversations, in the order of their first requests.

    Args:
        content: JSON lines.

    Raises:
        InvalidFieldError: a line has another form.
    """
    requests = _requests(content)
    began = requests[0].timestamp if requests else 0.0
    parting = _parting_blocks(requests)
    threads: list[_Thread] = []
    waiting: dict[int, _Thread] = {}  # by the last complete block of the last prompt
    for request in requests:
        thread = _earlier(request, waiting)
        if thread is None:
            thread = _Thread(f"request-{len(threads)}", request)
            threads.append(thread)
            thread.add(request, 0, began)
        else:
            thread.add(request, thread.last.input_length + thread.last.answer_tokens, began)
        if request.complete and request.complete[-1] not in parting:
            waiting[request.complete[-1]] = thread
    return [
        Script(thread.name, tuple(thread.turns), thread.turns[0].at_seconds) for thread in threads
    ]


def _requests(content: bytes) -> list[_Request]:
    found = []
    for number, request in json_lines(content, _Request):
        blocks = -(-request.input_length // BLOCK_TOKENS)
        if len(request.hash_ids) != blocks:
            raise refused(
                f"{request.input_length} tokens are {blocks} blocks of {BLOCK_TOKENS}, not "
                f"{len(request.hash_ids)}",
                number,
            )
        found.append(request)
    return sorted(found, key=lambda request: request.timestamp)


def _parting_blocks(requests: list[_Request]) -> set[int]:
    """Complete blocks that more than one complete block follows."""
    followers: dict[int, set[int]] = defaultdict(set)
    for request in requests:
        for block, following in zip(request.complete, request.complete[1:], strict=False):
            followers[block].add(following)
    return {block for block, found in followers.items() if len(found) > 1}


def _earlier(request: _Request, waiting: dict[int, _Thread]) -> _Thread | None:
    """The conversation that the request goes on with, which waits no longer."""
    for block in reversed(request.complete):
        thread = waiting.get(block)
        if thread is not None and thread.goes_on_with(request):
            return waiting.pop(block)
    return None
