"""What has to hold at the end of a run: pure rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.soak.leftovers import Look, grown
from bench.soak.memory import Trend
from bench.soak.tally import Tally

MOST_MIB_PER_MINUTE = 2.0
"""Growth of a router under a steady load that still counts as flat: less than 3 GiB a
day, and above what the allocator's own noise makes of a few minutes."""
_MOST_GROWTH = 0.05
"""Growth over the load, as a share, that counts as flat whatever the slope is."""
_MORE_TASKS = 3
"""Tasks that may have come or gone by chance: a request of this bench itself, a retry."""
_MORE_FILES = 12
"""Files that may be open more than before: idle connections in the engine's pool, and
SQLite's, are kept."""


@dataclass(frozen=True)
class Verdict:
    """One thing that has to hold, and whether it does."""

    holds: bool
    what: str


def on_answers(tally: Tally) -> Iterator[Verdict]:
    """What clients saw."""
    yield Verdict(tally.turns > 0 and not tally.wrong, f"every answer right: {tally.turns} turns")
    errors = sum(tally.unexcused.values())
    yield Verdict(
        not errors, f"no error that was not called for: {errors}, besides {tally.excused.total()}"
    )
    yield Verdict(not tally.hung, f"no turn hangs: {tally.hung}")
    yield Verdict(not tally.given_up, f"no turn is lost: {tally.given_up}")


def on_kills(kills: Mapping[str, int]) -> Verdict:
    """Whether there was an attack at all."""
    return Verdict(bool(kills), f"processes were killed: {sum(kills.values())}")


def on_memory(trends: Mapping[str, Trend]) -> Iterator[Verdict]:
    """Whether the memory of processes that were not killed is flat."""
    for name, trend in trends.items():
        growth = trend.last_mib / trend.first_mib - 1
        yield Verdict(
            trend.mib_per_minute <= MOST_MIB_PER_MINUTE or growth <= _MOST_GROWTH,
            f"memory of {name} is flat: {trend.first_mib:.0f} to {trend.last_mib:.0f} MiB, "
            f"{trend.mib_per_minute:+.2f} MiB per minute at the end",
        )


def on_rest(before: Look, after: Look, ends: Mapping[str, list[str]]) -> Iterator[Verdict]:
    """What is left when all is quiet.

    Args:
        before: when all was quiet before the load.
        after: at the end.
        ends: how processes ended that nobody had asked to, by name.
    """
    away = [*before.away, *after.away]
    yield Verdict(not away, f"every process answers{_listed(away)}")
    held = [f"{what} {count:g}" for what, count in after.still_held.items()]
    yield Verdict(not held, f"no turn, channel, handle, pin or block is left{_listed(held)}")
    more = left_over(before, after)
    yield Verdict(not more, f"no task or open file is left{_listed(more)}")
    ended = [f"{name}: {', '.join(how)}" for name, how in ends.items() if how]
    yield Verdict(not ended, f"no process ended by itself{_listed(ended)}")


def left_over(before: Look, after: Look) -> list[str]:
    """Tasks and open files that are more than chance makes of those before the load."""
    return [
        f"{what} {was:g} to {now:g}"
        for what, (was, now) in grown(before, after).items()
        if now - was > (_MORE_FILES if what.endswith("files") else _MORE_TASKS)
    ]


def _listed(items: list[str]) -> str:
    return f": {'; '.join(items)}" if items else ""
