"""What this router process has done lately: its last turns, and figures over time.

All of it is lost at the end of the process, and nothing is decided by it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.router.status.entry import TurnEntry

Clock = Callable[[], float]
_SOURCES = ("pulled", "cached", "recomputed")
_SAMPLES_PER_BUCKET = 256
"""TTFTs kept of one interval; a median of more is no better."""


@dataclass(slots=True)
class _Bucket:
    """Turns of one tenant that ended in one interval."""

    turns: int = 0
    followups: int = 0
    hits: int = 0
    failed: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SOURCES, 0))
    ttfts: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figures:
    """One tenant's turns in one interval."""

    end: float
    """Seconds since the epoch."""
    turns: int
    hit_rate: float | None
    """Share of follow-up turns that got their handle; None without such turns."""
    failed: int
    ttft_p50: float | None
    """Seconds; None without answered turns."""
    ttft_p90: float | None
    pulled: int
    cached: int
    recomputed: int


class TurnJournal:
    """Remembers turns as they end.

    Args:
        wall_clock: seconds since the epoch.
        capacity: turns remembered, over all tenants.
        bucket_seconds: length of an interval.
        buckets: intervals remembered.
    """

    def __init__(
        self,
        wall_clock: Clock,
        *,
        capacity: int = 1000,
        bucket_seconds: float = 10.0,
        buckets: int = 180,
    ) -> None:
        self._wall_clock = wall_clock
        self._bucket_seconds = bucket_seconds
        self._bucket_count = buckets
        self._turns: deque[TurnEntry] = deque(maxlen=capacity)
        self._buckets: dict[int, dict[str, _Bucket]] = {}
        self.changes = 0
        """Grows with every turn recorded."""

    def record(self, entry: TurnEntry) -> None:
        """Note a turn that has ended."""
        self.changes += 1
        self._turns.append(entry)
        index = self._index()
        for old in [known for known in self._buckets if known <= index - self._bucket_count]:
            del self._buckets[old]
        bucket = self._buckets.setdefault(index, {}).setdefault(entry.tenant, _Bucket())
        bucket.turns += 1
        bucket.followups += entry.is_followup
        bucket.hits += entry.is_followup and entry.handle_hit
        bucket.failed += entry.outcome == "failed"
        for source in _SOURCES:
            bucket.tokens[source] += getattr(entry, source)
        if entry.ttft is not None and len(bucket.ttfts) < _SAMPLES_PER_BUCKET:
            bucket.ttfts.append(entry.ttft)

    def turns(self, tenant: str, limit: int) -> list[TurnEntry]:
        """A tenant's last turns, newest first."""
        return list(_first(limit, (e for e in reversed(self._turns) if e.tenant == tenant)))

    def turn(self, tenant: str, turn_id: str) -> TurnEntry | None:
        """One turn of a tenant, if it is still remembered."""
        found = (e for e in reversed(self._turns) if (e.tenant, e.turn_id) == (tenant, turn_id))
        return next(found, None)

    def figures(self, tenant: str) -> list[Figures]:
        """A tenant's turns over time, oldest first, idle intervals included."""
        last = self._index()
        first = max(min(self._buckets, default=last), last - self._bucket_count + 1)
        return [self._figures(index, tenant) for index in range(first, last + 1)]

    def _figures(self, index: int, tenant: str) -> Figures:
        bucket = self._buckets.get(index, {}).get(tenant) or _Bucket()
        ttfts = sorted(bucket.ttfts)
        return Figures(
            end=(index + 1) * self._bucket_seconds,
            turns=bucket.turns,
            hit_rate=bucket.hits / bucket.followups if bucket.followups else None,
            failed=bucket.failed,
            ttft_p50=statistics.median(ttfts) if ttfts else None,
            ttft_p90=ttfts[min(len(ttfts) - 1, int(len(ttfts) * 0.9))] if ttfts else None,
            **bucket.tokens,
        )

    def _index(self) -> int:
        return int(self._wall_clock() // self._bucket_seconds)


def _first(limit: int, entries: Iterator[TurnEntry]) -> Iterator[TurnEntry]:
    for _, entry in zip(range(limit), entries, strict=False):
        yield entry
