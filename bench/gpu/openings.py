"""First turns that the ways of one repetition compute once.

The first turn of a long conversation takes prefill seconds, and every way takes it before
its turn is measured. Ways that run on the same engines may find it in prefill's cache, if
their prompts have one salt; the cache is emptied before the turns that are measured.
Those end differently for each way, or decode would find in its cache what it has computed
for another: answers cannot be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvloop.bench.rounds import Variant
from kvloop.bench.samples import Shape
from kvloop.bench.transfers import PrefillEngine
from kvloop.bench.turns import TurnRequest, TurnResult, TurnRunner


class SharedOpenings:
    """Implements TurnRunner: conversations of one repetition find each other's prefixes.

    Args:
        turns: takes the turns.
        prefill: emptied before each last turn; its prefix cache must be on. One
            conversation at a time: it cannot be emptied while a request runs.
        way: name of the variant, with which its conversations' names end.
        place: of the variant among all of them.
    """

    def __init__(self, turns: TurnRunner, prefill: PrefillEngine, way: str, place: int) -> None:
        self._turns = turns
        self._prefill = prefill
        self._way = way
        self._place = place

    async def run(self, request: TurnRequest) -> TurnResult:
        """See TurnRunner."""
        prompt = request.prompt
        if request.last:
            await self._prefill.reset_prefix_cache()
            prompt = _with_own_end(prompt, self._place)
        salt = request.conversation.removesuffix(f"-{self._way}")
        return await self._turns.run(replace(request, prompt=prompt, cache_salt=salt))

    async def end(self, conversation: str) -> None:
        """See TurnRunner."""
        await self._turns.end(conversation)


def sharing_openings(variants: list[Variant]) -> list[Variant]:
    """The ways with one opening for all; for plans that leave prefill's cache alone."""
    return [
        one
        if one.prefill is None
        else replace(one, turns=SharedOpenings(one.turns, one.prefill, one.name, place))
        for place, one in enumerate(variants)
    ]


def _with_own_end(prompt: Sequence[int], place: int) -> Sequence[int]:
    """The prompt with the tokens of its last message moved round."""
    tokens = Shape(1).message_tokens
    opening, message = prompt[:-tokens], prompt[-tokens:]
    moved = 1 + place
    return [*opening, *message[moved:], *message[:moved]]
