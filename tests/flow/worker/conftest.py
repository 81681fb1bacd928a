"""Sidecars that take their leave without haste."""

from __future__ import annotations

import pytest

from services.worker import registration


@pytest.fixture(autouse=True)
def farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the registry hears of it."""
    monkeypatch.setattr(registration, "_FAREWELL_SECONDS", 30)
