"""The charts of docs/benchmarks.md show what its tables say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.charts import DATA, FOLDER, draw

DOCUMENT = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
MEASURED: dict[str, Any] = json.loads(DATA.read_text())


@pytest.mark.parametrize(
    "row",
    [row for name, rows in MEASURED.items() if name != "source" for row in rows],
    ids=lambda row: f"{row['off']}-{row['on']}",
)
def test_every_pair_of_figures_stands_in_the_document(row: dict[str, Any]) -> None:
    text = DOCUMENT.replace("**", "")
    assert re.search(rf"\b{row['off']} → {row['on']}\b", text)


def test_prefill_legs_and_pulls_stand_in_the_document() -> None:
    for row in MEASURED["one_gpu"]:
        told = f"| {row['shape']} | {row['tokens'] / 1000:.1f}k | {row['off']} → {row['on']} |"
        (line,) = [line for line in DOCUMENT.splitlines() if line.startswith(told)]
        assert f"| {row['prefill_on']} | {row['pull']} |" in line


def test_the_committed_charts_are_those_of_the_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = draw(tmp_path, MEASURED)
    assert {path.name for path in FOLDER.iterdir()} == {path.name for path in written}
    for path in written:
        assert f"charts/{path.name}" in DOCUMENT
        assert 2_000 < path.stat().st_size < 60_000
