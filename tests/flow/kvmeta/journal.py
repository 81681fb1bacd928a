"""What clients of the ledger did and were told, in the order of their own time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tests.flow.kvmeta.ledger_spec import Answer, Operation


@dataclass(slots=True)
class Call:
    """One call.

    Without an answer it is not known whether the ledger carried it out: it did so
    between `began` and `ended`, or never.
    """

    conversation: str
    operation: Operation
    began: int
    answer: Answer | None = None
    ended: int | None = None
    """None: it may still be carried out."""
    handle_id: str = ""
    """Id of the handle in the answer, if there is one."""


class Journal:
    """Collects calls. `began` and `ended` count the events of all of them."""

    def __init__(self) -> None:
        self._now = 0
        self._calls: dict[str, list[Call]] = defaultdict(list)

    @property
    def conversations(self) -> dict[str, list[Call]]:
        """The calls of each conversation, in the order in which they began."""
        return dict(self._calls)

    def begin(self, conversation: str, operation: Operation) -> Call:
        """A call is about to be sent."""
        call = Call(conversation, operation, self._tick())
        self._calls[conversation].append(call)
        return call

    def answered(self, call: Call, answer: Answer, handle_id: str = "") -> None:
        """Its answer has come."""
        call.answer, call.handle_id = answer, handle_id
        call.ended = self._tick()

    def settled(self, call: Call) -> None:
        """Its answer will never come, and nobody is left who could carry it out."""
        call.ended = self._tick()

    def _tick(self) -> int:
        self._now += 1
        return self._now
