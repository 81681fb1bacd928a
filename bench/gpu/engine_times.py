"""What vLLM's own metrics say about one request: waiting, computing, first token."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

_TIMEOUT_SECONDS = 10.0
_HISTOGRAMS = {
    "queue_seconds": "request_queue_time_seconds",
    "prefill_seconds": "request_prefill_time_seconds",
    "ttft_seconds": "time_to_first_token_seconds",
    "whole_seconds": "e2e_request_latency_seconds",
}
_SAMPLE = re.compile(
    rf"^vllm:({'|'.join(_HISTOGRAMS.values())})_(sum|count)(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """One request as its engine saw it; None where the engine did not tell of just one.

    Attributes:
        queue_seconds: until it was scheduled. A pull is in it.
        prefill_seconds: from then to the first token.
        ttft_seconds: from its arrival in the HTTP server, its body read, to the first token.
        whole_seconds: from there to its end; not told of requests that were given up.
    """

    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    ttft_seconds: float | None = None
    whole_seconds: float | None = None


class EngineSums:
    """Sums over all requests of an engine so far.

    Args:
        metrics: its metrics page.
    """

    def __init__(self, metrics: str) -> None:
        self._sums: dict[tuple[str, str], float] = {}
        for name, kind, value in _SAMPLE.findall(metrics):
            self._sums[name, kind] = self._sums.get((name, kind), 0.0) + float(value)

    def since(self, earlier: Self) -> EngineTimes:
        """The one request that came between."""
        return EngineTimes(**{f.name: self._grown(earlier, f.name) for f in fields(EngineTimes)})

    def _grown(self, earlier: Self, field: str) -> float | None:
        total, count = (
            self._sums.get((_HISTOGRAMS[field], kind), 0.0)
            - earlier._sums.get((_HISTOGRAMS[field], kind), 0.0)
            for kind in ("sum", "count")
        )
        return total if count == 1 else None


class EngineWatch:
    """Looks at a pair of engines after each turn.

    Args:
        prefill_url: of the prefill server.
        decode_url: of the decode server.
        fetch: reads a page.
    """

    def __init__(
        self, prefill_url: str, decode_url: str, fetch: Callable[[str], str] | None = None
    ) -> None:
        self._urls = (f"{prefill_url}/metrics", f"{decode_url}/metrics")
        self._fetch = fetch or _fetch
        self._seen: tuple[EngineSums, EngineSums] | None = None

    async def look(self) -> tuple[EngineTimes, EngineTimes]:
        """The requests since the last look, on prefill and on decode."""
        pages = await asyncio.gather(*(asyncio.to_thread(self._fetch, u) for u in self._urls))
        before, now = self._seen, (EngineSums(pages[0]), EngineSums(pages[1]))
        self._seen = now
        if before is None:
            return EngineTimes(), EngineTimes()
        return now[0].since(before[0]), now[1].since(before[1])


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
        return str(answer.read().decode())
