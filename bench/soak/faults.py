"""What is made to go wrong with single turns, and what may come of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.soak.speakers import Manner


@dataclass(frozen=True)
class Injection:
    """One thing that goes wrong.

    Attributes:
        name: for the report.
        may_fail: the turn may end in an error. Otherwise it has to be answered.
        fault: for the engines, as in docs/sim-engine.md; empty: the client's doing.
        leaves: the client hangs up in the middle of the answer.
        pauses: the client stops reading in the middle of the answer.
    """

    name: str
    may_fail: bool
    fault: str = ""
    leaves: bool = False
    pauses: bool = False

    def manner(self, answer: int) -> Manner:
        """How a client meets it in a turn of so many tokens."""
        half = max(answer // 2, 1)
        return Manner(
            answer,
            fault=self.fault.format(half=half),
            leave_after=half if self.leaves else None,
            pause_after=half if self.pauses else None,
            pause_seconds=3.0,
        )


INJECTIONS = (
    # Prefill can be repeated or left out, so none of these may be seen.
    Injection("prefill is busy", False, "status;code=503;leg=prefill"),
    Injection("prefill fails", False, "status;code=500;leg=prefill"),
    Injection("prefill hangs up", False, "drop;leg=prefill"),
    Injection("prefill dies in its answer", False, "die;leg=prefill"),
    Injection("prefill answers late", False, "slow_first_byte;seconds=3;leg=prefill"),
    Injection("prefill loses the handshake", False, "lose_handshake;leg=prefill"),
    Injection("prefill's pull fails", False, "fail_transfer;leg=prefill"),
    Injection("prefill's pull is slow", False, "slow_transfer;seconds=3;leg=prefill"),
    # As the fault stays with the turn, decode meets it in both attempts.
    Injection("decode is busy", True, "status;code=503;leg=decode"),
    Injection("decode fails", True, "status;code=500;leg=decode"),
    Injection("decode hangs up", True, "drop;leg=decode"),
    Injection("decode dies in mid-stream", True, "die;after_tokens={half};leg=decode"),
    Injection("decode fails in mid-stream", True, "stream_error;after_tokens={half};leg=decode"),
    Injection("decode answers late", False, "slow_first_byte;seconds=3;leg=decode"),
    Injection("decode pauses", False, "stall;after_tokens={half};seconds=3;leg=decode"),
    Injection("decode loses the handshake", False, "lose_handshake;leg=decode"),
    Injection("decode's pull fails", False, "fail_transfer;leg=decode"),
    Injection("decode writes byte by byte", False, "byte_by_byte;leg=decode"),
    Injection("the event is lost", False, "no_event;leg=decode"),
    Injection("the event is late", False, "delay_event;seconds=3;leg=decode"),
    Injection("the client hangs up", False, leaves=True),
    Injection("the client stops reading", False, pauses=True),
)


class Dice:
    """Decides which turns meet something.

    Args:
        share: of the turns.
        rng: decides.
    """

    def __init__(self, share: float, rng: random.Random) -> None:
        self._share = share
        self._rng = rng

    def draw(self) -> Injection | None:
        """What the next turn meets, if anything."""
        return self._rng.choice(INJECTIONS) if self._rng.random() < self._share else None
