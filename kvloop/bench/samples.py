"""What a run of the benchmark leaves: one sample for each turn."""

from __future__ import annotations

from dataclasses import dataclass

from kvloop.bench.transfers import Transfers
from kvloop.bench.turns import TurnResult


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a conversation.

    Attributes:
        context_tokens: tokens of the first message.
        answer_tokens: tokens generated in each turn but the last.
        message_tokens: tokens of each further message.
        turns: turns of the conversation, at least 2.
        last_answer_tokens: tokens generated in the last turn, whose own KV
            nobody will use.
        conversations: conversations held at once.
    """

    context_tokens: int
    answer_tokens: int = 64
    message_tokens: int = 200
    turns: int = 2
    last_answer_tokens: int = 32
    conversations: int = 1

    def __post_init__(self) -> None:
        if self.turns < 2:
            raise ValueError("reuse needs at least two turns")
        if min(self.context_tokens, self.message_tokens, self.conversations) < 1:
            raise ValueError("context, messages and conversations are at least 1")
        if min(self.answer_tokens, self.last_answer_tokens) < 1:
            raise ValueError("an answer has at least one token")

    def answer_of(self, turn: int) -> int:
        """Tokens generated in a turn; turns count from 1."""
        return self.last_answer_tokens if turn == self.turns else self.answer_tokens

    @property
    def largest_prompt(self) -> int:
        """Tokens of the last turn's prompt."""
        return self.context_tokens + (self.turns - 1) * (self.answer_tokens + self.message_tokens)


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one conversation, one way.

    Attributes:
        shape: size of the conversation.
        variant: way in which it was held, such as "off" or "on".
        repetition: number of the repetition, from 0; warm-ups leave no samples.
        conversation: number of the conversation in its repetition, from 0.
        turn: number of the turn, from 1.
        result: what it took; None if it failed.
        error: why it failed; None if it did not.
    """

    shape: Shape
    variant: str
    repetition: int
    conversation: int
    turn: int
    result: TurnResult | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RoundSample:
    """One turn of all conversations of a repetition, one way.

    Attributes:
        shape: size of the conversations.
        variant: way in which they were held.
        repetition: as in Sample.
        turn: as in Sample.
        started_at: time of the first call, by the run's clock.
        seconds: from the first call to the end of the last answer.
        transfers: what prefill pulled meanwhile, by its engine's own count; None
            if the engine cannot be asked.
    """

    shape: Shape
    variant: str
    repetition: int
    turn: int
    started_at: float
    seconds: float
    transfers: Transfers | None


@dataclass(frozen=True, slots=True)
class Run:
    """All samples of one run."""

    samples: tuple[Sample, ...]
    rounds: tuple[RoundSample, ...]
