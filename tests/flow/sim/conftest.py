"""Engines for flow tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.flow.sim.engines import EngineClient, engine


@pytest.fixture
async def prefill() -> AsyncIterator[EngineClient]:
    """A prefill engine."""
    async with engine(role="prefill") as client:
        yield client


@pytest.fixture
async def decode() -> AsyncIterator[EngineClient]:
    """A decode engine."""
    async with engine(role="decode") as client:
        yield client


@pytest.fixture
async def referee() -> AsyncIterator[EngineClient]:
    """An engine that computes everything itself: what it says is right."""
    async with engine(role="both") as client:
        yield client
