"""Fixtures for the simulated engine's own parts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.sim.lab import Lab, open_lab


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    """Engines with virtual time."""
    async with open_lab() as opened:
        yield opened
