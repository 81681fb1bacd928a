"""Taking one turn and timing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from kvloop.aio import AsyncClient
from kvloop.chunks import Chunk
from kvloop.errors import KvloopError


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn of one conversation.

    Attributes:
        conversation: name of the conversation, unique in the run.
        prompt: the whole history as token ids, the new message last.
        answer_tokens: tokens to generate, no fewer and no more.
        reuse: let prefill pull what decode retains.
        last: no further turn of this conversation follows.
        cache_salt: sets its prefixes apart from those of others in every engine's
            prefix cache; empty: the conversation's name.
    """

    conversation: str
    prompt: Sequence[int]
    answer_tokens: int
    reuse: bool
    last: bool
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What one turn took and what was done for it.

    Attributes:
        token_ids: the tokens generated; empty where none were asked for.
        generated_tokens: how many they are, by the engine's own count.
        ttft_seconds: from the call to the first chunk, at the client.
        total_seconds: from the call to the end of the answer.
        gaps_seconds: between the chunks after the first, one for each.
        prefill_leg_seconds: part of the time to the first chunk.
        decode_leg_seconds: the same, from the start of the decode leg.
        prompt_tokens: tokens in the prompt.
        pulled_tokens: of those, pulled from decode.
        cached_tokens: of those, found in prefill's own prefix cache.
        recomputed_tokens: of those, computed.
        miss_reason: why nothing was pulled; None if something was.
        retained_tokens: tokens kept on decode for the next turn.
        pull_seconds: what the pull took, from the engine's decision to the last
            block; None if nothing was pulled or it is not known.
        router_ttft_seconds: time to the first chunk as the router saw it; None
            without a router.
        expected_pull_seconds: what prefill expected of pulling; None if it did not
            say, as while the link is not measured.
        expected_recompute_seconds: the same of computing those tokens.
        record_id: under which whoever runs the benchmark keeps more about the turn;
            None if nothing more is kept.
    """

    token_ids: tuple[int, ...]
    generated_tokens: int
    ttft_seconds: float
    total_seconds: float
    gaps_seconds: tuple[float, ...]
    prefill_leg_seconds: float
    decode_leg_seconds: float
    prompt_tokens: int
    pulled_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    miss_reason: str | None
    retained_tokens: int
    pull_seconds: float | None = None
    router_ttft_seconds: float | None = None
    expected_pull_seconds: float | None = None
    expected_recompute_seconds: float | None = None
    record_id: str | None = None

    @property
    def outside_legs_seconds(self) -> float:
        """Time to the first chunk that neither leg had: client, router and ledger."""
        return max(self.ttft_seconds - self.prefill_leg_seconds - self.decode_leg_seconds, 0.0)


class TurnRunner(Protocol):
    """Takes turns on whatever is measured.

    Two conversations of different cache salts share nothing in any engine's prefix
    cache, however equal their tokens.
    """

    async def run(self, request: TurnRequest) -> TurnResult:
        """Take one turn to its end.

        Raises:
            KvloopError: the turn failed.
        """
        ...

    async def end(self, conversation: str) -> None:
        """Give up what is retained for a conversation; never fails."""
        ...


class KvloopTurns:
    """Takes turns through a kvloop router.

    Args:
        client: of the router.
        model: served model name.
        clock: monotonic seconds.
        timeout_seconds: limit for one turn.
        last_ids: whether token ids are asked for in conversations' last turns too. vLLM
            sends the whole prompt's with the first chunk then, which no chat client asks for;
            without them answers cannot be compared.
    """

    def __init__(
        self,
        client: AsyncClient,
        model: str,
        clock: Callable[[], float],
        *,
        timeout_seconds: float = 600.0,
        last_ids: bool = True,
    ) -> None:
        self._client = client
        self._model = model
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._last_ids = last_ids

    async def run(self, request: TurnRequest) -> TurnResult:
        """See TurnRunner."""
        with_ids = self._last_ids or not request.last
        started = self._clock()
        answer = self._client.generate(
            request.prompt,
            model=self._model,
            conversation_id=request.conversation,
            disable_reuse=not request.reuse,
            max_tokens=request.answer_tokens,
            temperature=0.0,
            ignore_eos=True,
            extra_body={
                "cache_salt": request.cache_salt or request.conversation,
                "return_token_ids": with_ids,
            },
            timeout_seconds=self._timeout_seconds,
        )
        async with answer:
            times = [self._clock() async for chunk in answer if _has_tokens(chunk, with_ids)]
            ended = self._clock()
            done = await answer.collect()
        receipt = done.receipt
        return TurnResult(
            token_ids=done.token_ids,
            generated_tokens=done.usage.completion_tokens,
            ttft_seconds=(times[0] if times else ended) - started,
            total_seconds=ended - started,
            gaps_seconds=tuple(after - before for before, after in pairwise(times)),
            prefill_leg_seconds=receipt.prefill_leg_seconds,
            decode_leg_seconds=receipt.decode_leg_seconds,
            prompt_tokens=receipt.prompt_tokens or done.usage.prompt_tokens,
            pulled_tokens=receipt.pulled_tokens,
            cached_tokens=receipt.cached_tokens,
            recomputed_tokens=receipt.recomputed_tokens,
            miss_reason=receipt.miss_reason,
            retained_tokens=receipt.retained_tokens,
            pull_seconds=receipt.pull_seconds if receipt.pulled_tokens else None,
            router_ttft_seconds=receipt.ttft_seconds,
            expected_pull_seconds=receipt.expected_pull_seconds,
            expected_recompute_seconds=receipt.expected_recompute_seconds,
        )

    async def end(self, conversation: str) -> None:
        """See TurnRunner."""
        try:
            await self._client.end_conversation(conversation, model=self._model)
        except KvloopError:
            return  # what is retained falls with its TTL


def _has_tokens(chunk: Chunk, with_ids: bool) -> bool:
    """Without ids every chunk counts: a token need not have any text."""
    if not with_ids:
        return bool(chunk.choices)
    return any(choice.token_ids or choice.text for choice in chunk.choices)
