"""What is said in the demo: a report that grows from turn to turn."""

from __future__ import annotations

import random
from dataclasses import dataclass

_SUBJECTS = ("The harbour", "The mill", "The north depot", "The observatory", "The ferry office")
_VERBS = ("reported", "counted", "returned", "ordered", "stored", "inspected")
_OBJECTS = ("crates of salt", "coils of rope", "lamp wicks", "charts", "barrels of tar", "sails")
_REASONS = (
    "before the tide turned",
    "because the road was closed",
    "as the ledger of the previous week demands",
    "while two clerks were away",
    "so that the winter store is complete",
)


@dataclass(frozen=True, slots=True)
class DemoScript:
    """The user's side of one conversation: a long start, then short additions.

    That is the shape of agents' conversations, whose turns add a tool's output or
    a question to a context that is long already.

    Attributes:
        turns: number of turns, at least 2.
        first_characters: length of the first message, about.
        further_characters: length of each later message, about.
        answer_tokens: tokens generated in each turn.
    """

    turns: int = 4
    first_characters: int = 13_000
    further_characters: int = 900
    answer_tokens: int = 48

    def __post_init__(self) -> None:
        if self.turns < 2:
            raise ValueError("reuse needs at least two turns")

    def messages(self) -> list[str]:
        """The user's messages, the same in every run."""
        source = random.Random(0)
        sizes = [self.first_characters] + [self.further_characters] * (self.turns - 1)
        return [
            f"Part {part} of the report.\n{_report(source, size)}\n"
            "Sum up what is new in one paragraph."
            for part, size in enumerate(sizes, start=1)
        ]


def _report(source: random.Random, characters: int) -> str:
    text = ""
    while len(text) < characters:
        text += (
            f"{source.choice(_SUBJECTS)} {source.choice(_VERBS)} {source.randint(2, 999)} "
            f"{source.choice(_OBJECTS)} {source.choice(_REASONS)}. "
        )
    return text
