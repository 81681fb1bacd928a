"""Event loops for the tests of the sidecar's parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.unit.leaping_loop import LeapingLoop


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests choose a loop by `pytest.mark.asyncio(loop_factories=["leaping"])`."""
    marker = item.get_closest_marker("asyncio")
    if marker is None or "loop_factories" not in marker.kwargs:
        return {"usual": asyncio.new_event_loop}
    return {"leaping": LeapingLoop}
