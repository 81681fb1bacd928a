"""Reads what processes say of themselves: Prometheus metrics, and the engines' state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import aiohttp

_SAMPLE = re.compile(r"^([a-z_A-Z:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Metrics:
    """The metrics of one process at one moment.

    Args:
        text: as Prometheus reads them.
    """

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[str, float]]] = {}
        for name, labels, value in _SAMPLE.findall(text):
            self._samples.setdefault(name, []).append((labels, float(value)))

    def total(self, name: str) -> float:
        """The sum over all labels.

        Raises:
            KeyError: there is no such metric: nothing may pass for 0 that is not told.
        """
        return sum(value for _, value in self._samples[name])

    def by_label(self, name: str) -> Mapping[str, float]:
        """The values that are not 0, by the only label's."""
        return {
            labels.partition('"')[2].rstrip('"'): value
            for labels, value in self._samples.get(name, ())
            if value
        }


class Scraper:
    """Asks processes.

    Args:
        session: for HTTP.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def metrics(self, port: int) -> Metrics | None:
        """A process's metrics; None if it is away."""
        try:
            async with self._session.get(f"http://127.0.0.1:{port}/metrics") as reply:
                return Metrics(await reply.text())
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return None

    async def engine(self, port: int) -> dict[str, Any] | None:
        """A simulated engine's state; None if it is away."""
        try:
            async with self._session.get(f"http://127.0.0.1:{port}/sim/state") as reply:
                state: dict[str, Any] = await reply.json()
                return state
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return None
