"""What has happened so far, turn by turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bench.soak.speakers import Heard, Trouble
from bench.soak.talks import Said, matches, shorten

_EXAMPLES = 20


@dataclass
class Tally:
    """Counts of one run.

    Attributes:
        turns: answered rightly and to their end.
        tokens: of their answers.
        prompt_tokens: by where their KV came from, as receipts say.
        receipts: answered turns that came with one.
        hits: those of them that pulled.
        misses: the others, by reason.
        injected: turns by what was made to go wrong with them.
        left: turns that the client ended.
        excused: errors that were called for, by what they were.
        unexcused: all others.
        wrong: answers that were not right.
        hung: turns that did not come to an end.
        repeated: turns sent again after an error.
        given_up: turns that failed however often they were sent.
        examples: some of what must not be, in words.
        slowest_seconds: the turn that took longest, repeats included.
    """

    turns: int = 0
    tokens: int = 0
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    receipts: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    left: int = 0
    excused: Counter[str] = field(default_factory=Counter)
    unexcused: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    hung: int = 0
    repeated: int = 0
    given_up: int = 0
    examples: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0

    def judge(self, heard: Heard, right: Said, answer: int, name: str, excuse: str) -> bool:
        """Count what came of one turn.

        Args:
            heard: what came.
            right: the right answer.
            answer: tokens in it.
            name: of the conversation.
            excuse: why an error may have come; empty if none may.

        Returns:
            Whether the turn was answered to its end, or its client left.
        """
        whole = heard.trouble is None and not heard.left
        if not matches(heard.said, right, whole=whole):
            self.wrong += 1
            self.example(f"{name}: {shorten(heard.said)} instead of {shorten(right)}")
        if heard.trouble is not None:
            self._error(heard.trouble, name, excuse)
            return False
        self.left += heard.left
        self.turns += whole
        self.tokens += answer if whole else 0
        if heard.receipt is not None:
            receipt = heard.receipt
            self.receipts += 1
            self.hits += receipt.miss_reason is None
            if receipt.miss_reason is not None:
                self.misses[receipt.miss_reason] += 1
            self.prompt_tokens["pulled"] += receipt.pulled_tokens
            self.prompt_tokens["cached"] += receipt.cached_tokens
            self.prompt_tokens["recomputed"] += receipt.recomputed_tokens
        return True

    def took(self, seconds: float) -> None:
        """Note how long an answered turn took, repeats included."""
        self.slowest_seconds = max(self.slowest_seconds, seconds)

    def hangs(self, name: str, seconds: float) -> None:
        """Count a turn that did not come to an end."""
        self.hung += 1
        self.example(f"{name}: no end after {seconds:.0f} s")

    def gives_up(self, name: str) -> None:
        """Count a turn that failed however often it was sent."""
        self.given_up += 1
        self.example(f"{name}: given up")

    def example(self, text: str) -> None:
        """Keep a few of what must not be."""
        if len(self.examples) < _EXAMPLES:
            self.examples.append(text)

    def _error(self, trouble: Trouble, name: str, excuse: str) -> None:
        if excuse:
            self.excused[f"{trouble.what} ({excuse})"] += 1
        else:
            self.unexcused[trouble.what] += 1
            self.example(f"{name}: {trouble.what}: {trouble.detail}")
