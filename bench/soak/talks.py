"""Conversations: what is asked next, and what must be answered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.soak.referee import Referee
from services.sim.vocabulary import WORDS

Said = list[int] | str
"""An answer or a part of it: token ids, or words."""


class Talk(Protocol):
    """One conversation."""

    @property
    def name(self) -> str:
        """Its id, where clients send one."""
        ...

    def ask(self, words: int) -> None:
        """Say something new."""
        ...

    def right(self, referee: Referee, count: int) -> Said:
        """The answer that must come now, so many tokens long."""
        ...

    def answered(self, said: Said) -> None:
        """Take an answer into the history."""
        ...


class TokenTalk:
    """A conversation in token ids.

    Args:
        name: its id.
        rng: chooses what is said.
    """

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self.tokens: list[int] = []
        self._rng = rng

    def ask(self, words: int) -> None:
        """See Talk."""
        self.tokens += [self._rng.randrange(1000, 2500) for _ in range(words)]

    def right(self, referee: Referee, count: int) -> Said:
        """See Talk."""
        return referee.tokens(self.tokens, count)

    def answered(self, said: Said) -> None:
        """See Talk."""
        assert isinstance(said, list)
        self.tokens += said


class ChatTalk:
    """A conversation in messages, which is known by its history alone.

    Args:
        name: begins what is said, so that no two conversations are equal.
        rng: chooses what is said.
    """

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self.messages: list[dict[str, Any]] = []
        self._rng = rng

    def ask(self, words: int) -> None:
        """See Talk."""
        text = " ".join([self.name, *self._rng.choices(WORDS, k=words)])
        self.messages.append({"role": "user", "content": text})

    def right(self, referee: Referee, count: int) -> Said:
        """See Talk."""
        return referee.text(self.messages, count)

    def answered(self, said: Said) -> None:
        """See Talk."""
        self.messages.append({"role": "assistant", "content": said})


@dataclass(frozen=True)
class Lengths:
    """How long conversations are.

    Attributes:
        words: asked in each turn, about one token each: least and most.
        answer: tokens of each answer.
        turns: of a conversation at most.
    """

    words: tuple[int, int]
    answer: int
    turns: int


def matches(said: Said, right: Said, *, whole: bool) -> bool:
    """Whether an answer is the right one, or as far as it came its beginning."""
    return said == right if whole else said == right[: len(said)]


def shorten(said: Sequence[object], most: int = 8) -> str:
    """The beginning of an answer, for a report of a wrong one."""
    return repr(said[:most])
