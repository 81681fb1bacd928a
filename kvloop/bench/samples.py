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
class Workload:
    """Conversations of many sizes that come as their scripts and arrivals say.

    Attributes:
        name: what they are, such as the name of a trace.
        arrivals: how they come, in words.
        conversations: how many there are.
        turns: turns of the longest.
    """

    name: str
    arrivals: str
    conversations: int
    turns: int


Load = Shape | Workload
"""What is held: conversations of one size in rounds, or of many as they come."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one conversation, one way.

    Attributes:
        shape: what it is part of.
        variant: way in which it was held, such as "off" or "on".
        repetition: number of the repetition, from 0; warm-ups leave no samples.
        conversation: number of the conversation in its repetition, from 0.
        turn: number of the turn, from 1.
        result: what it took; None if it failed.
        error: why it failed; None if it did not.
        prompt_digest: equal for equal prompts; 0 where all ways have the same one.
        late_seconds: how much later than planned it began.
    """

    shape: Load
    variant: str
    repetition: int
    conversation: int
    turn: int
    result: TurnResult | None
    error: str | None = None
    prompt_digest: int = 0
    late_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundSample:
    """One turn of all conversations of a repetition, one way; or all turns of a workload.

    Attributes:
        shape: what was held.
        variant: way in which they were held.
        repetition: as in Sample.
        turn: as in Sample; 0 for all turns of a workload.
        started_at: time of the first call, by the run's clock.
        seconds: from the first call to the end of the last answer.
        transfers: what prefill pulled meanwhile, by its engine's own count; None
            if the engine cannot be asked.
        retained_blocks: most KV blocks that the ledger knew to be retained on all
            decode workers; None if it was not asked.
    """

    shape: Load
    variant: str
    repetition: int
    turn: int
    started_at: float
    seconds: float
    transfers: Transfers | None
    retained_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """The unit in which a model's decode engines keep KV.

    Attributes:
        tokens: tokens of a block.
        bytes: of a block, over all layers and ranks; 0 if unknown.
        total: blocks of all decode engines.
    """

    tokens: int
    bytes: int
    total: int

    def bytes_of(self, tokens: int) -> int:
        """Bytes of the blocks that hold some tokens."""
        return -(-tokens // self.tokens) * self.bytes


@dataclass(frozen=True, slots=True)
class Run:
    """All samples of one run.

    Attributes:
        samples: one for each turn.
        rounds: one for each round, or each time that a workload was held.
        blocks: KV blocks of the model; None if they are not known.
    """

    samples: tuple[Sample, ...]
    rounds: tuple[RoundSample, ...]
    blocks: KvBlocks | None = None
