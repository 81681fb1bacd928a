"""How long tests of a folder may take, where that is not the default."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest


def limit(items: Iterable[pytest.Item], folder: Path, seconds: float) -> None:
    """Give the tests in a folder so much time, but for those that name a limit themselves."""
    for item in items:
        if folder in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(seconds))
