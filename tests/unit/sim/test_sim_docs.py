"""The manual names everything that there is."""

from __future__ import annotations

from pathlib import Path

from services.sim.faults import FaultKind
from services.sim.latency import Preset

_MANUAL = (Path(__file__).parents[3] / "docs" / "sim-engine.md").read_text()


def test_every_fault_has_a_row() -> None:
    rows = [line for line in _MANUAL.splitlines() if line.startswith("| `")]
    assert [kind for kind in FaultKind if not any(f"| `{kind}` |" in row for row in rows)] == []


def test_every_preset_has_a_row() -> None:
    assert [preset for preset in Preset if f"| `{preset}`" not in _MANUAL] == []
