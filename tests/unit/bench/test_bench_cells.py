"""Samples reduced to medians, ratios and records."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from kvloop.bench.cells import Cell, cells, gain
from kvloop.bench.files import cell_record, write_csv, write_json
from kvloop.bench.outputs import OutputCheck, first_difference
from kvloop.bench.samples import RoundSample, Run, Sample, Shape
from kvloop.bench.tables import output_lines, ttft_table
from kvloop.bench.transfers import Transfers
from tests.unit.bench.fakes import result

SHAPE = Shape(100, turns=2)


def _run() -> Run:
    samples = []
    for repetition, (off, on) in enumerate([(0.4, 0.1), (0.6, 0.2), (0.5, 0.3)]):
        samples += [
            Sample(SHAPE, "off", repetition, 0, 1, result(ttft=0.3, miss_reason="FIRST_TURN")),
            Sample(SHAPE, "off", repetition, 0, 2, result(ttft=off, miss_reason="REUSE_DISABLED")),
            Sample(SHAPE, "on", repetition, 0, 2, result(ttft=on, pulled=64)),
        ]
    samples.append(Sample(SHAPE, "on", 3, 0, 2, None, "UNAVAILABLE: it is away"))
    pulled = Transfers(1, 1e9, 0.02, 0.01, 64.0)
    rounds = [RoundSample(SHAPE, "on", r, 2, 0.0, 0.5, pulled) for r in range(3)]
    return Run(tuple(samples), tuple(rounds))


def _cell(variant: str, turn: int) -> Cell:
    return next(c for c in cells(_run()) if (c.variant, c.turn) == (variant, turn))


def test_each_turn_and_variant_has_a_cell_in_order() -> None:
    assert [(c.turn, c.variant) for c in cells(_run())] == [(1, "off"), (2, "off"), (2, "on")]


def test_a_cell_tells_medians_and_counts_failures() -> None:
    cell = _cell("on", 2)
    assert cell.ttft is not None
    assert (cell.ttft.p50, cell.ttft.least, cell.ttft.most) == (0.2, 0.1, 0.3)
    assert (cell.pulled_tokens, cell.recomputed_tokens, cell.failures) == (64, 36, 1)
    assert cell.tokens_per_second == pytest.approx(9 / 1.5)
    assert _cell("off", 2).misses == {"REUSE_DISABLED": 3}


def test_the_gain_is_the_ratio_of_medians_of_the_same_turn() -> None:
    found = cells(_run())
    assert gain(found, _cell("on", 2)) == pytest.approx(2.5)
    assert gain(found, _cell("off", 2)) == 1.0
    assert gain(found, _cell("on", 2), baseline="control") is None


def test_the_prefill_leg_splits_into_pull_and_computing() -> None:
    cell = _cell("on", 2)
    assert cell.transfer_seconds == pytest.approx(0.02)
    assert cell.compute_seconds == pytest.approx(0.16 - 0.02)
    assert cell.transfers is not None
    assert cell.transfers.bytes_per_second == pytest.approx(5e10)
    assert _cell("off", 2).transfer_seconds is None
    assert _cell("off", 2).compute_seconds == pytest.approx(0.4)


def test_the_table_shows_every_cell() -> None:
    table = ttft_table(cells(_run()))
    assert table.row_count == 3
    ratios = list(table.columns[8].cells)
    assert ratios == ["-", "-", "2.5x"]
    assert list(table.columns[-1].cells) == ["3", "3", "3 (1 failed)"]


def test_the_files_hold_every_cell_and_sample(tmp_path: Path) -> None:
    run, found = _run(), cells(_run())
    write_csv(tmp_path / "cells.csv", found)
    write_json(tmp_path / "run.json", run, found, [], {"model": "tiny"})
    with (tmp_path / "cells.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert float(rows[2]["ttft_p50"]) == 0.2
    assert rows[1]["misses"] == "REUSE_DISABLED=3"
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["conditions"] == {"model": "tiny"}
    assert len(document["samples"]) == 10
    assert document["samples"][0]["result"]["token_ids"] == 3
    assert len(document["rounds"]) == 3


def test_all_records_have_the_same_keys() -> None:
    found = cells(_run())
    assert len({tuple(cell_record(cell, found)) for cell in found}) == 1


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [5], 0), ([], [], None)],
)
def test_the_first_difference_is_found(one: list[int], other: list[int], index: int | None) -> None:
    assert first_difference(one, other) == index


def test_the_comparison_of_answers_is_told_in_words() -> None:
    checks = [
        OutputCheck("on", 5, 3, (7, 2)),
        OutputCheck("control", 5, 5, ()),
        OutputCheck("none", 0, 0, ()),
    ]
    assert output_lines(checks) == [
        "on: 3 of 5 answers equal those recomputed; the others part at token 7, 2",
        "control: 5 of 5 answers equal those recomputed",
    ]
