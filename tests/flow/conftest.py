"""Whole services in each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.time_limits import limit

PATIENCE_SECONDS = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that hangs is ended, and one on a busy machine is not."""
    limit(items, Path(__file__).parent, PATIENCE_SECONDS)
