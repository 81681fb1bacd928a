"""When conversations begin, and when each of their turns is due. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.bench.scripts import Script, ScriptedTurn


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How conversations come.

    Open loop: they begin when it is time, whether or not earlier ones have ended; at a
    rate, at random (Poisson), or as recorded. Closed loop: a fixed number at once, each
    followed by the next.

    Attributes:
        rate: conversations per second; None for recorded times or a closed loop.
        at_once: conversations at once, in a closed loop; None for an open one.
        time_scale: recorded times and pauses pass that many times faster.
    """

    rate: float | None = None
    at_once: int | None = None
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.rate is not None and self.at_once is not None:
            raise ValueError("conversations come at a rate or a number at once, not both")
        if self.rate is not None and self.rate <= 0:
            raise ValueError("a rate is more than 0 conversations per second")
        if self.at_once is not None and self.at_once < 1:
            raise ValueError("at least one conversation is held at once")
        if self.time_scale <= 0:
            raise ValueError("a time scale is more than 0")

    def __str__(self) -> str:
        """In words."""
        if self.at_once is not None:
            return f"{self.at_once} at once"
        faster = f", times {self.time_scale:g}" if self.time_scale != 1 else ""
        return ("as recorded" if self.rate is None else f"{self.rate:g} per second") + faster

    def starts(self, scripts: Sequence[Script], source: random.Random) -> list[float] | None:
        """Seconds after which each conversation begins; None in a closed loop.

        Raises:
            ValueError: they shall come as recorded, and their times were not.
        """
        if self.at_once is not None:
            return None
        if self.rate is not None:
            at, found = 0.0, []
            for _ in scripts:
                at += source.expovariate(self.rate)
                found.append(at)
            return found
        recorded = [s.start_seconds for s in scripts if s.start_seconds is not None]
        if len(recorded) < len(scripts):
            raise ValueError("the trace has no times: say at which rate, or how many at once")
        first = min(recorded, default=0.0)
        return [(start - first) / self.time_scale for start in recorded]

    def due(self, script: Script, turn: ScriptedTurn, started: float, ended: float) -> float:
        """When a turn after the first begins, by the clock of the other times.

        Args:
            script: its conversation.
            turn: the turn.
            started: when the conversation began.
            ended: when its last answer ended.
        """
        paused = ended + turn.pause_seconds / self.time_scale
        if self.at_once is not None or turn.at_seconds is None:
            return paused
        offset = turn.at_seconds - (script.turns[0].at_seconds or 0.0)
        return max(started + offset / self.time_scale, paused)
