"""Charts of cells."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvloop.bench.cells import Cell, cells
from kvloop.bench.charts import write_charts
from kvloop.bench.samples import RoundSample, Run, Sample, Shape
from kvloop.bench.transfers import Transfers
from kvloop.errors import UnsupportedError
from tests.unit.bench.fakes import result


def _cells(*, transfers: bool = True) -> list[Cell]:
    shapes = [Shape(tokens, turns=2) for tokens in (100, 200)]
    samples = [
        Sample(shape, variant, repetition, 0, turn, result(prompt=shape.context_tokens))
        for shape in shapes
        for variant in ("off", "on")
        for repetition in range(2)
        for turn in (1, 2)
    ]
    pulled = Transfers(1, 1e9, 0.02, 0.01, 64.0) if transfers else None
    rounds = [RoundSample(shape, "on", 0, 2, 0.0, 1.0, pulled) for shape in shapes]
    return cells(Run(tuple(samples), tuple(rounds)))


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_all_charts_are_drawn(tmp_path: Path, suffix: str, magic: bytes) -> None:
    written = write_charts(tmp_path, _cells(), suffix)
    assert [path.name for path in written] == [
        f"ttft-by-context.{suffix}",
        f"ttft-by-turn.{suffix}",
        f"prefill-split.{suffix}",
    ]
    assert all(path.read_bytes().startswith(magic) for path in written)


def test_a_chart_without_data_is_left_out(tmp_path: Path) -> None:
    written = write_charts(tmp_path, _cells(transfers=False))
    assert [path.stem for path in written] == ["ttft-by-context", "ttft-by-turn"]
    assert write_charts(tmp_path, []) == []


def test_without_matplotlib_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"kvloop\[bench\]"):
        write_charts(tmp_path, _cells())
