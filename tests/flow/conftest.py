"""Whole services in each test."""

from __future__ import annotations

from pathlib import Path

import pytest

PATIENCE_SECONDS = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that hangs is ended, and one on a busy machine is not."""
    for item in items:
        here = Path(__file__).parent in Path(item.path).parents
        if here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PATIENCE_SECONDS))
