"""One choice of an answer, from tokens to text: stop strings and what they hold back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.sim.sequence import Ending, Output
from services.sim.tokenizer import Detokenizer


@dataclass
class Delta:
    """What one output adds to a choice."""

    text: str
    tokens: list[int]
    digests: list[bytes]
    """Digest before each token."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class StopStrings:
    """Finds stop strings in text that comes in pieces.

    Args:
        stops: the strings.
        include: whether the string stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held_back = 0 if include else max((len(stop) for stop in stops), default=1) - 1
        self._longest = max((len(stop) for stop in stops), default=0)
        self._text = ""
        self._released = 0

    def add(self, text: str, *, searching: bool) -> str | None:
        """Take in text; return the stop string that it completes, if it does.

        Args:
            text: new text.
            searching: whether a stop string may end the answer yet.
        """
        if not self._stops:
            self._text += text
            return None
        start = max(len(self._text) - self._longest + 1, 0)
        self._text += text
        if not searching or not text:
            return None
        found = [
            (position, stop)
            for stop in self._stops
            if (position := self._text.find(stop, start)) >= 0
        ]
        if not found:
            return None
        position, stop = min(found)
        self._text = self._text[: position + (len(stop) if self._include else 0)]
        return stop

    def release(self, *, finished: bool) -> str:
        """Text that is certain to be part of the answer and was not given out yet."""
        end = len(self._text) if finished else max(len(self._text) - self._held_back, 0)
        released = self._text[self._released : end]
        self._released = max(self._released, end)
        return released


@dataclass
class Choice:
    """One choice while it grows."""

    stops: StopStrings
    detokenizer: Detokenizer
    min_tokens: int
    show_stop_token: bool
    """Whether a stop token's own text is part of the answer."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: Output) -> Delta | None:
        """Take in one output; None if the choice has ended before.

        If a stop string ends it here, the engine does not know yet: the sequence
        is still running then.
        """
        if self.finish_reason is not None:
            return None
        new_tokens = [] if output.token is None else [output.token]
        self.tokens += new_tokens
        digests = [output.digest] if new_tokens else []
        self.digests += digests
        text = ""
        if output.token is not None:
            hidden = output.stop_token is not None and not self.show_stop_token
            text = "" if hidden else self.detokenizer.add(output.token)
        found = self.stops.add(text, searching=len(self.tokens) > self.min_tokens)
        if output.ending is not None:
            self.finish_reason = str(output.ending)
            self.stop_reason = output.stop_token
        if found is not None and output.ending is not Ending.STOP:
            self.finish_reason, self.stop_reason = str(Ending.STOP), found
        released = self.stops.release(finished=self.finish_reason is not None)
        self.text += released
        return Delta(released, new_tokens, digests, self.finish_reason, self.stop_reason)
