"""What other requests feel of reuse: time between their chunks, off and on. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvloop.bench.samples import RoundSample, Run, Shape
from kvloop.bench.stats import Distribution, distribution
from kvloop.bench.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Time between the chunks of other requests while turns that can reuse ran.

    Attributes:
        off: with reuse off, in seconds; None if no chunk came meanwhile.
        on: with reuse on.
        answers: requests that were answered in all.
        failures: requests that failed.
    """

    off: Distribution | None
    on: Distribution | None
    answers: int
    failures: int

    @property
    def share(self) -> float | None:
        """By how much slower decode is with reuse on; below 0: faster. By the means,
        which a few long pauses move and medians do not. None if it is not known."""
        if self.off is None or self.on is None or not self.off.mean:
            return None
        return self.on.mean / self.off.mean - 1

    def record(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "slower_by": self.share}


def slowdown(seen: Traffic, run: Run, *, prefill_legs_only: bool = False) -> Slowdown:
    """Compare what other requests felt while reuse was off and on.

    Args:
        seen: the other requests.
        run: the turns, in variants "off" and "on".
        prefill_legs_only: look at the prefill legs of the turns alone, in which decode
            serves the pull and has nothing else of the turn to do. Without, at whole
            rounds.
    """
    windows = {
        name: list(_legs(run, name) if prefill_legs_only else _rounds(run, name))
        for name in ("off", "on")
    }
    return Slowdown(
        off=distribution(seen.gaps_during(windows["off"])),
        on=distribution(seen.gaps_during(windows["on"])),
        answers=len(seen.answers),
        failures=seen.failures,
    )


def _rounds(run: Run, variant: str) -> Iterator[tuple[float, float]]:
    """Start and end of rounds in which turns could reuse."""
    for found in run.rounds:
        if found.variant == variant and (found.turn > 1 or not isinstance(found.shape, Shape)):
            yield found.started_at, found.started_at + found.seconds


def _legs(run: Run, variant: str) -> Iterator[tuple[float, float]]:
    """Start and end of the prefill legs of rounds with one conversation at a time."""
    rounds = {(r.repetition, r.turn): r for r in run.rounds if r.variant == variant}
    for sample in run.samples:
        found: RoundSample | None = rounds.get((sample.repetition, sample.turn))
        if sample.variant != variant or sample.turn < 2 or sample.result is None or found is None:
            continue
        yield found.started_at, found.started_at + sample.result.prefill_leg_seconds
