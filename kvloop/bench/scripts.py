"""Conversations as they shall be held: sizes and times, fixed before a run.

A script says what its user adds in each turn and how long each answer is. The answers
themselves are the engine's. Tokens are drawn from named streams: equal names give equal
tokens, so that conversations can share a prefix.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

FIRST_TOKEN = 10
"""Tokens are drawn from here up; below it special tokens are frequent."""
_DRAWN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Draw:
    """Part of a stream of random tokens.

    Attributes:
        stream: its name; equal names give equal tokens in one run.
        start: tokens of the stream to pass over.
        count: tokens to take.
    """

    stream: str
    start: int
    count: int

    def __len__(self) -> int:
        return self.count


Piece = Draw | tuple[int, ...]
"""Tokens to draw, or the tokens themselves."""


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One turn.

    Attributes:
        message: what the user adds to the history, piece by piece.
        answer_tokens: tokens to generate.
        pause_seconds: from the end of the last answer to this turn; of first turns
            without meaning.
        at_seconds: when it was taken, from the start of the trace; None if that was not
            recorded. It begins no sooner, and not before the last answer has ended.
    """

    message: tuple[Piece, ...]
    answer_tokens: int
    pause_seconds: float = 0.0
    at_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.message_tokens < 1 or self.answer_tokens < 1:
            raise ValueError("a message and an answer have at least one token")
        if self.pause_seconds < 0 or (self.at_seconds or 0.0) < 0:
            raise ValueError("times are not negative")

    @property
    def message_tokens(self) -> int:
        """Tokens that the user adds."""
        return sum(map(len, self.message))


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation.

    Attributes:
        name: unique among the scripts of a run.
        turns: at least one.
        start_seconds: when it began, from the start of the trace; None if that was not
            recorded.
    """

    name: str
    turns: tuple[ScriptedTurn, ...]
    start_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("a conversation has at least one turn")

    @property
    def largest_prompt(self) -> int:
        """Tokens of the last turn's prompt."""
        answers = sum(turn.answer_tokens for turn in self.turns[:-1])
        return answers + sum(turn.message_tokens for turn in self.turns)


class TokenStreams:
    """Draws tokens. Equal names give equal tokens.

    Args:
        seed: of all streams.
        vocabulary: tokens are drawn from FIRST_TOKEN up to this.
    """

    def __init__(self, seed: int, vocabulary: int) -> None:
        if vocabulary <= FIRST_TOKEN:
            raise ValueError(f"the vocabulary has more than {FIRST_TOKEN} tokens")
        self._seed = seed
        self._span = vocabulary - FIRST_TOKEN

    def tokens(self, pieces: Iterable[Piece]) -> list[int]:
        """The tokens of some pieces, one after the other."""
        return list(chain.from_iterable(map(self._of, pieces)))

    def _of(self, piece: Piece) -> Sequence[int]:
        if not isinstance(piece, Draw):
            return piece
        # Bytes of a stream do not depend on how many are drawn after them.
        drawn = random.Random(f"{self._seed}/{piece.stream}").randbytes(
            (piece.start + piece.count) * _DRAWN_BYTES
        )
        taken = memoryview(drawn)[piece.start * _DRAWN_BYTES :].cast("I")
        span = self._span
        return [FIRST_TOKEN + number % span for number in taken]


def longest(scripts: Sequence[Script]) -> int:
    """Turns of the longest conversation."""
    return max((len(script.turns) for script in scripts), default=0)


def synthetic(
    source: random.Random,
    count: int,
    *,
    context_tokens: Sequence[int],
    answer_tokens: Sequence[int],
    message_tokens: int,
    turns: int,
    pause_seconds: float,
) -> list[Script]:
    """Conversations of random sizes.

    Args:
        source: of the sizes.
        count: conversations.
        context_tokens: first messages, one of which is drawn for each conversation.
        answer_tokens: the same of answers.
        message_tokens: tokens of further messages.
        turns: turns of each.
        pause_seconds: between two turns.
    """
    made = []
    for number in range(count):
        name = f"synthetic-{number}"
        sizes = [source.choice(context_tokens), *[message_tokens] * (turns - 1)]
        answer = source.choice(answer_tokens)
        made.append(
            Script(
                name,
                tuple(
                    ScriptedTurn((Draw(f"{name}/{turn}", 0, size),), answer, pause_seconds)
                    for turn, size in enumerate(sizes)
                ),
            )
        )
    return made
