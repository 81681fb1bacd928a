"""What vLLM loads of kvloop."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from services.worker import engine_detokenizer, engine_front
from services.worker.engine_events import EVENTS_SOCKET


def test_the_plugin_that_is_installed_registers_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVENTS_SOCKET, "/run/decode.sock")
    registered: list[str] = []
    for part in (engine_detokenizer, engine_front):
        name = part.__name__
        monkeypatch.setattr(part, "register", lambda name=name: registered.append(name))
    (plugin,) = entry_points(group="vllm.general_plugins", name="kvloop")
    plugin.load()()
    assert registered == [engine_detokenizer.__name__, engine_front.__name__]
