"""How long a leg would wait and take on one worker, by what this router sees there.

A leg waits for what this router has in flight, and for what others have. What legs
took beyond their own work and this router's queue is therefore kept as waiting
time, and forgotten within seconds.

What `wait` reads are plain attributes: a policy reads them itself, of hundreds of
workers in less than a hundred microseconds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from kvloop.common.v1 import common_pb2
from services.router.speeds import ASSUMED, SpeedLines, Speeds

_MEMORY_SECONDS = 5.0
"""After which an observed wait is forgotten; until then it fades evenly."""
_SMOOTHING = 0.3
"""Weight of a new wait against the remembered ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """One leg in flight."""

    started: float
    work_seconds: float
    """What it was expected to take, apart from waiting."""
    queue_seconds: float
    """How long it was expected to wait for what this router had in flight."""
    tokens: int
    """Tokens that a decode leg has to read."""
    in_flight: int
    """Turns of this router there, this one included."""


class WorkerLoad(ABC):
    """One worker's queue and figures. Times are readings of the router's clock.

    Args:
        fleet: figures of all workers of the model. They stand in for a worker's own,
            which only prefill workers have, and only those that say what they expect:
            few legs timed from outside tell less of one engine than many of all.
    """

    def __init__(self, fleet: SpeedLines | None = None) -> None:
        self.fleet = fleet or SpeedLines()
        self.own: Speeds | None = None
        """The worker's own figures; None before it has any."""
        self.calm_at = 0.0
        """When the last observed wait is forgotten."""
        self.fading = 0.0
        """How much of it is forgotten per second; what is left is `fading` times the
        time until `calm_at`. Decode workers: per turn in flight."""
        self.busy = False
        """Whether legs are in flight that have not been answered."""
        self.due_at = math.inf
        """When the oldest of those should be over, or answered."""
        self.behind = 0.0
        """Prefill workers: what the legs behind it should take together."""
        self._unanswered: dict[Leg, None] = {}  # oldest first

    @property
    def speeds(self) -> Speeds:
        """What legs cost here."""
        return self.own or self.fleet.speeds

    @abstractmethod
    def wait(self, in_flight: int, now: float) -> float:
        """How long a leg that came now would wait.

        Args:
            in_flight: turns of this router there.
            now: the time.
        """

    @abstractmethod
    def started(
        self, now: float, *, prompt: int, held: int, in_flight: int, cached: int = 0
    ) -> Leg:
        """A leg begins.

        Args:
            now: the time.
            prompt: tokens of the prompt, as far as is known.
            held: those of them that a prefill worker can pull, or that a decode
                worker has.
            in_flight: other turns of this router there.
            cached: tokens of the prompt that a prefill worker is likely to have.
        """

    def gave_up(self, leg: Leg, now: float) -> None:
        """A leg failed or was cut off. No effect on one that has ended."""
        if leg in self._unanswered:
            self._leave(leg, now)

    @abstractmethod
    def _leave(self, leg: Leg, now: float) -> None:
        """Take a leg out of the queue."""

    def _waited(self, now: float, seconds: float) -> None:
        remembered = self._remembered(now)
        remembered += _SMOOTHING * (max(seconds, 0.0) - remembered)
        self.fading, self.calm_at = remembered / _MEMORY_SECONDS, now + _MEMORY_SECONDS

    def _remembered(self, now: float) -> float:
        return self.fading * (self.calm_at - now) if self.calm_at > now else 0.0


class PrefillLoad(WorkerLoad):
    """A prefill worker's: the engine computes one prompt after the other."""

    def __init__(self, fleet: SpeedLines | None = None) -> None:
        super().__init__(fleet)
        self._lines = SpeedLines()
        self._since = 0.0  # when work on the oldest leg in flight began

    def wait(self, in_flight: int, now: float) -> float:
        """See `WorkerLoad.wait`. If the oldest leg in flight is overdue by some time, it
        is expected to take as much again. The legs behind it make that no better."""
        return self._queue(now) + self._remembered(now)

    def started(
        self, now: float, *, prompt: int, held: int, in_flight: int, cached: int = 0
    ) -> Leg:
        """See `WorkerLoad.started`."""
        work = self.speeds.prefill(prompt, held, cached)
        leg = Leg(now, work, self._queue(now), prompt, in_flight + 1)
        if self.busy:
            self.behind += work
        else:
            self.busy, self._since, self.due_at, self.behind = True, now, now + work, 0.0
        self._unanswered[leg] = None
        return leg

    def ended(self, leg: Leg, now: float, report: common_pb2.PrefillReport) -> None:
        """A leg has come to its end."""
        # What the engine did since it finished the leg before was this one's work.
        service = now - max(leg.started, self._since)
        self._leave(leg, now)
        # What was wrong about the guess of the prompt's length is no wait.
        done = report.cached_tokens + report.pulled_tokens
        work = report.pull_duration.ToTimedelta().total_seconds()
        work += self.speeds.compute(done, done + report.recomputed_tokens)
        self._waited(now, now - leg.started - work - leg.queue_seconds)
        for lines, otherwise in ((self.fleet, ASSUMED), (self._lines, self.fleet.speeds)):
            lines.prefilled(report, service)
            lines.settle(otherwise)
        if self._lines.told:
            self.own = self._lines.speeds

    def _leave(self, leg: Leg, now: float) -> None:
        was_oldest = leg is next(iter(self._unanswered))
        del self._unanswered[leg]
        self.busy = bool(self._unanswered)
        if not self.busy:
            return
        oldest, *behind = self._unanswered
        if was_oldest:  # or else the engine goes on with what it has been at
            self._since, self.due_at = now, now + oldest.work_seconds
        self.behind = sum(other.work_seconds for other in behind)

    def _queue(self, now: float) -> float:
        return abs(self.due_at - now) + self.behind if self.busy else 0.0


class DecodeLoad(WorkerLoad):
    """A decode worker's: it runs many turns at once, up to what it has room for."""

    def wait(self, in_flight: int, now: float) -> float:
        """See `WorkerLoad.wait`. Remembered waits shrink and grow with the turns there."""
        return max(self._remembered(now) * (in_flight + 1), now - self.due_at)

    def started(
        self, now: float, *, prompt: int, held: int, in_flight: int, cached: int = 0
    ) -> Leg:
        """See `WorkerLoad.started`."""
        tokens = max(prompt - held, 0)
        leg = Leg(now, self.speeds.hand_over(tokens), 0.0, tokens, in_flight + 1)
        self._unanswered[leg] = None
        self._look()
        return leg

    def first_chunk(self, leg: Leg, now: float) -> None:
        """A leg's first chunk has come."""
        self._leave(leg, now)
        seconds = now - leg.started
        self.fleet.handed_over(leg.tokens, seconds)
        self.fleet.settle(ASSUMED)
        self._waited(now, (seconds - leg.work_seconds) / leg.in_flight)

    def _leave(self, leg: Leg, now: float) -> None:
        del self._unanswered[leg]
        self._look()

    def _look(self) -> None:
        oldest = next(iter(self._unanswered), None)
        self.busy = oldest is not None
        self.due_at = oldest.started + oldest.work_seconds if oldest is not None else math.inf
