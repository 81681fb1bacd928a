"""Measures pulls on a running stack, by a few short conversations of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from kvloop.client import Client
from kvloop.completions import Completion
from kvloop.doctor.facts import Probe, ProbeRound
from kvloop.errors import KvloopError

_FIRST_TOKEN = 10
_LAST_TOKEN = 4000
"""Tokens are drawn from in between, where special tokens are rare."""
_MESSAGE_TOKENS = 32
_SHORT_ANSWER_TOKENS = 4


@dataclass(frozen=True)
class ProbePlan:
    """What to run.

    Attributes:
        model: served model name.
        prompt_tokens: tokens of each conversation's first prompt.
        answer_tokens: tokens generated in its first turn. A prefill engine whose
            prefix cache holds the prompt pulls these alone.
        rounds: conversations. A link's first pull shakes hands, and may be small.
        timeout_seconds: limit for one turn.
    """

    model: str
    prompt_tokens: int
    answer_tokens: int
    rounds: int = 3
    timeout_seconds: float = 300.0


class Talker(Protocol):
    """Takes turns."""

    def turn(
        self, prompt: list[int], conversation: str, *, answer_tokens: int, reuse: bool
    ) -> Completion:
        """Take one turn of a conversation.

        Raises:
            KvloopError: the turn failed.
        """
        ...

    def end(self, conversation: str) -> None:
        """Give up what is retained for a conversation; never fails."""
        ...


class RouterTalker:
    """Takes turns through a router. See `Talker`."""

    def __init__(self, client: Client, plan: ProbePlan) -> None:
        self._client = client
        self._plan = plan

    def turn(
        self, prompt: list[int], conversation: str, *, answer_tokens: int, reuse: bool
    ) -> Completion:
        """See `Talker.turn`."""
        return self._client.generate(
            prompt,
            model=self._plan.model,
            conversation_id=conversation,
            disable_reuse=not reuse,
            max_tokens=answer_tokens,
            temperature=0.0,
            ignore_eos=True,
            # Nothing of other conversations, or of earlier probes, is in any cache.
            extra_body={"cache_salt": conversation, "return_token_ids": True},
            timeout_seconds=self._plan.timeout_seconds,
        ).collect()

    def end(self, conversation: str) -> None:
        """See `Talker.end`."""
        try:
            self._client.end_conversation(conversation, model=self._plan.model)
        except KvloopError:
            return  # what is retained falls with its TTL


def probe(talker: Talker, plan: ProbePlan, source: random.Random) -> Probe:
    """Run the conversations.

    Args:
        talker: takes turns.
        plan: how many, and how long.
        source: of tokens and names.

    Raises:
        KvloopError: a turn failed.
    """
    name = f"kvloop-doctor-{source.getrandbits(64):016x}"
    rounds = tuple(
        _round(talker, plan, f"{name}-{number}", source) for number in range(plan.rounds)
    )
    length = plan.prompt_tokens + plan.answer_tokens + _MESSAGE_TOKENS
    alone = talker.turn(
        _tokens(source, length),
        f"{name}-alone",
        answer_tokens=_SHORT_ANSWER_TOKENS,
        reuse=False,
    )
    return Probe(rounds, alone.receipt)


def _round(talker: Talker, plan: ProbePlan, conversation: str, source: random.Random) -> ProbeRound:
    prompt = _tokens(source, plan.prompt_tokens)
    try:
        first = talker.turn(prompt, conversation, answer_tokens=plan.answer_tokens, reuse=True)
        history = [*prompt, *first.token_ids, *_tokens(source, _MESSAGE_TOKENS)]
        second = talker.turn(history, conversation, answer_tokens=_SHORT_ANSWER_TOKENS, reuse=True)
    finally:
        talker.end(conversation)
    return ProbeRound(first.receipt, second.receipt)


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(count)]
