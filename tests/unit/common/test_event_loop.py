"""Services run on uvloop if it is there, and without it if not."""

from __future__ import annotations

import asyncio
import sys

import pytest

from services.common import event_loop


async def _loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def test_uvloop_is_used_where_it_is_installed() -> None:
    assert event_loop.run(_loop_module()) == "uvloop"


def test_without_uvloop_asyncio_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert event_loop.run(_loop_module()) == "asyncio"
