"""Recomputing a prompt in another split: the control for what a pull does to sums.

A pull leaves the end of a prompt to be computed by itself, in a smaller batch than a
recomputation of the whole, and in 16-bit formats sums round differently in batches of
other sizes. So two recomputations are compared that differ in just that: one computes
the prompt at once, the other finds its beginning in prefill's cache.
"""

from __future__ import annotations

import aiohttp
import msgspec

from kvloop.bench.turns import TurnRequest, TurnResult, TurnRunner
from kvloop.errors import UnavailableError


class SplitTurns:
    """Implements TurnRunner: takes turns after prefill has computed part of the prompt.

    Args:
        turns: takes them.
        session: for the prefill server, whose prefix cache must be on.
        prefill_url: of that server.
        model: served model name.
        tail_tokens: tokens at the end of each prompt that are left to the turn.
    """

    def __init__(
        self,
        turns: TurnRunner,
        session: aiohttp.ClientSession,
        prefill_url: str,
        model: str,
        *,
        tail_tokens: int,
    ) -> None:
        self._turns = turns
        self._session = session
        self._url = f"{prefill_url}/v1/completions"
        self._model = model
        self._tail_tokens = tail_tokens

    async def run(self, request: TurnRequest) -> TurnResult:
        """See TurnRunner."""
        beginning = request.prompt[: -self._tail_tokens]
        if beginning:
            await self._compute(request.conversation, list(beginning))
        return await self._turns.run(request)

    async def end(self, conversation: str) -> None:
        """See TurnRunner."""
        await self._turns.end(conversation)

    async def _compute(self, cache_salt: str, prompt: list[int]) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": cache_salt,
        }
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                self._url, data=msgspec.json.encode(body), headers=headers
            ) as answer:
                if answer.status != 200:
                    raise UnavailableError(f"{self._url} answered {answer.status}")
                await answer.read()
        except aiohttp.ClientError as error:
            raise UnavailableError(f"{self._url}: {error}") from error
