"""Worlds that many cases share."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

from tests.flow.faults.life import Life
from tests.flow.faults.world import Setup, World, world


class Worlds:
    """Worlds that many cases share, and a new one after a case that has failed.

    Each lives in a task of its own, as tests and fixtures run in different ones.

    Args:
        tmp_path: for their files.
    """

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._lives: dict[Setup, Life[World]] = {}
        self._seeds = itertools.count()

    async def of(self, setup: Setup) -> World:
        """A world in which all is well."""
        if setup not in self._lives:
            path = self._tmp_path / f"world-{self.seed()}"
            path.mkdir()
            self._lives[setup] = Life(partial(world, path, setup))
            await self._lives[setup].start()
        return self._lives[setup].service

    async def give_up(self, setup: Setup) -> None:
        """Close a world."""
        await self._lives.pop(setup).end()

    def seed(self) -> int:
        """Another one each time."""
        return next(self._seeds)

    async def aclose(self) -> None:
        """Close all."""
        for setup in list(self._lives):
            await self.give_up(setup)
