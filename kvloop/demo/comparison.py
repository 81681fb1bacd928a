"""Runs the script with reuse off and on, fairly, and compares turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvloop.aio import AsyncClient
from kvloop.completions import Completion
from kvloop.demo.script import DemoScript
from kvloop.errors import KvloopError
from kvloop.messages import Message


@dataclass(frozen=True, slots=True)
class TurnComparison:
    """One turn of the script, both ways.

    Attributes:
        turn: number, from 1.
        context_tokens: tokens in the prompt.
        pulled_tokens: of those, pulled from decode with reuse on.
        recomputed_tokens: of those, recomputed with reuse on.
        miss_reason: why nothing was pulled; None if something was.
        ttft_off_seconds: time to the first chunk with reuse off, at the client.
        ttft_on_seconds: the same with reuse on.
        identical: both answers had the same tokens.
    """

    turn: int
    context_tokens: int
    pulled_tokens: int
    recomputed_tokens: int
    miss_reason: str | None
    ttft_off_seconds: float
    ttft_on_seconds: float
    identical: bool

    @property
    def ratio(self) -> float:
        """How many times sooner the first chunk came with reuse on."""
        return self.ttft_off_seconds / self.ttft_on_seconds


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All turns."""

    turns: tuple[TurnComparison, ...]

    @property
    def identical(self) -> bool:
        """Every answer had the same tokens both ways."""
        return all(turn.identical for turn in self.turns)

    @property
    def reused(self) -> bool:
        """Every turn after the first pulled KV."""
        return all(turn.pulled_tokens > 0 for turn in self.turns[1:])


@dataclass(slots=True)
class _Conversation:
    """One way of holding the conversation.

    Both ways send the same tokens. A cache salt of its own keeps each from
    hitting what the other left in an engine's prefix cache.
    """

    name: str
    reuse: bool
    history: list[Message | Mapping[str, Any]] = field(default_factory=list)

    async def say(
        self,
        client: AsyncClient,
        model: str,
        message: str,
        answer_tokens: int,
        clock: Callable[[], float],
    ) -> tuple[Completion, float]:
        """Take one turn; returns the answer and its time to the first chunk."""
        self.history.append({"role": "user", "content": message})
        started = clock()
        answer = client.chat(
            self.history,
            model=model,
            conversation_id=self.name,
            disable_reuse=not self.reuse,
            max_tokens=answer_tokens,
            temperature=0.0,
            ignore_eos=True,
            extra_body={"cache_salt": self.name, "return_token_ids": True},
        )
        async with answer:
            first = started
            async for _ in answer:
                first = clock()
                break
            completion = await answer.collect()
        self.history.append(completion.message)
        return completion, first - started


async def run_demo(
    client: AsyncClient,
    model: str,
    script: DemoScript,
    *,
    name: str,
    clock: Callable[[], float],
    on_turn: Callable[[TurnComparison], None],
) -> DemoResult:
    """Hold the conversation twice, turn by turn, and compare.

    A short throwaway conversation each way comes first, since an engine's first
    request of a new shape is slow.

    Args:
        client: of the router.
        model: served model name.
        script: what is said.
        name: prefix of the conversation ids; must not have been used before.
        clock: monotonic seconds.
        on_turn: called after each turn.

    Raises:
        KvloopError: a turn failed.
    """
    warm_up = replace(script, turns=2, answer_tokens=8)
    await _converse(client, model, warm_up, f"{name}-warm-up", clock, lambda turn: None)
    turns = await _converse(client, model, script, name, clock, on_turn)
    return DemoResult(tuple(turns))


async def _converse(
    client: AsyncClient,
    model: str,
    script: DemoScript,
    name: str,
    clock: Callable[[], float],
    on_turn: Callable[[TurnComparison], None],
) -> list[TurnComparison]:
    off = _Conversation(f"{name}-off", reuse=False)
    on = _Conversation(f"{name}-on", reuse=True)
    compared = []
    for turn, message in enumerate(script.messages(), start=1):
        answers: dict[bool, tuple[Completion, float]] = {}
        # Whoever goes second may profit from a warmer machine: take turns at it.
        for conversation in (off, on) if turn % 2 else (on, off):
            answers[conversation.reuse] = await conversation.say(
                client, model, message, script.answer_tokens, clock
            )
        compared.append(_compare(turn, *answers[False], *answers[True]))
        on_turn(compared[-1])
    await _end(client, model, (off, on))
    return compared


def _compare(
    turn: int, off: Completion, ttft_off: float, on: Completion, ttft_on: float
) -> TurnComparison:
    receipt = on.receipt
    return TurnComparison(
        turn=turn,
        context_tokens=receipt.prompt_tokens,
        pulled_tokens=receipt.pulled_tokens,
        recomputed_tokens=receipt.recomputed_tokens,
        miss_reason=receipt.miss_reason,
        ttft_off_seconds=ttft_off,
        ttft_on_seconds=ttft_on,
        identical=(off.token_ids, off.text) == (on.token_ids, on.text),
    )


async def _end(client: AsyncClient, model: str, conversations: Sequence[_Conversation]) -> None:
    for conversation in conversations:
        try:
            await client.end_conversation(conversation.name, model=model)
        except KvloopError:
            return  # the ledger is away; what is retained falls with its TTL
