"""Streams of completions as they arrive: what bare ways and the router's HTTP front share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import msgspec

from kvloop.bench.turns import TurnRequest, TurnResult
from kvloop.errors import UnavailableError

_PATH = "/v1/completions"
_DATA = b"data: "


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class Piece(msgspec.Struct):
    """A chunk of a stream; the last may have usage and no choice."""

    choices: list[_Choice] = []
    usage: _Usage | None = None


_piece = msgspec.json.Decoder(Piece).decode


@dataclass
class Answer:
    """What has arrived.

    Attributes:
        tokens: their ids, if they were asked for.
        generated: how many there are, by the engine's count.
        times: when pieces with a choice came.
    """

    tokens: list[int] = field(default_factory=list)
    generated: int = 0
    times: list[float] = field(default_factory=list)

    async def read(
        self, reply: aiohttp.ClientResponse, clock: Callable[[], float]
    ) -> AsyncIterator[Piece]:
        """Take pieces in as they come, and show each."""
        async for line in reply.content:
            if not line.startswith(_DATA + b"{"):
                continue
            piece = _piece(line[len(_DATA) :])
            if piece.choices:
                self.times.append(clock())
                self.tokens += piece.choices[0].token_ids or ()
            if piece.usage is not None:
                self.generated = piece.usage.completion_tokens
            yield piece

    def result(
        self,
        request: TurnRequest,
        started: float,
        *,
        prefill_leg_seconds: float = 0.0,
        decode_leg_seconds: float = 0.0,
        pulled_tokens: int = 0,
    ) -> TurnResult:
        """The turn that this was; what is not known of it is 0 or None."""
        return TurnResult(
            token_ids=tuple(self.tokens[: request.answer_tokens]),
            # What comes with the last piece beyond what was wanted is not counted either.
            generated_tokens=min(self.generated, request.answer_tokens),
            ttft_seconds=self.times[0] - started,
            total_seconds=self.times[-1] - started,
            gaps_seconds=tuple(after - before for before, after in pairwise(self.times)),
            prefill_leg_seconds=prefill_leg_seconds,
            decode_leg_seconds=decode_leg_seconds,
            prompt_tokens=len(request.prompt),
            pulled_tokens=pulled_tokens,
            cached_tokens=0,
            recomputed_tokens=0,
            miss_reason=None,
            retained_tokens=0,
        )


def completion_body(
    model: str, request: TurnRequest, prompt: msgspec.Raw, **members: object
) -> bytes:
    """A request for greedy tokens, and as many as are asked for.

    Args:
        model: served model name.
        request: the turn.
        prompt: its token ids, encoded.
        members: further ones.
    """
    body: Mapping[str, object] = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        **members,
    }
    return msgspec.json.encode(body)


@asynccontextmanager
async def completion(
    session: aiohttp.ClientSession, url: str, body: bytes
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A reply with status 200, to be read.

    Raises:
        UnavailableError: there is none.
    """
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(url + _PATH, data=body, headers=headers) as reply:
            if reply.status != 200:
                raise UnavailableError(f"{url} answered {reply.status}: {await reply.text()}")
            yield reply
    except aiohttp.ClientError as error:
        raise UnavailableError(f"{url}: {error}") from error
