"""Medians of a run's samples take the place of those in measured.json, as they are charted."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import medians
from bench.gpu.charts import DATA, draw
from bench.gpu.medians import updated
from bench.gpu.outcome import Outcome
from kvloop.bench.samples import Run, Sample, Shape
from tests.unit.bench.fakes import result

MEASURED: dict[str, Any] = json.loads(DATA.read_text())


def part(runs: dict[str, tuple[str, ...]], shape: Shape) -> dict[str, Any]:
    """A part's file: every turn of every way, off ten times as slow as others."""
    found = Outcome()
    for name, ways in runs.items():
        samples = []
        for way in ways:
            for repetition, factor in enumerate((1.0, 1.2, 5.0)):
                for turn in range(1, shape.turns + 1):
                    ttft = (1.0 if way.endswith("off") else 0.1) * factor
                    taken = result(ttft=ttft, prompt=shape.largest_prompt, pull_seconds=0.007)
                    samples.append(Sample(shape, way, repetition, 0, turn, taken))
        found.keep(name, Run(tuple(samples), ()))
    written: dict[str, Any] = json.loads(json.dumps(found.records()))
    return written


def test_a_run_on_one_gpu_replaces_the_rows_of_its_shape_alone() -> None:
    runs = {"q8-8192": ("on", "off", "bare-on"), "q8-after-1-s": ("on", "bare-on")}
    made = updated(MEASURED, {"q8": part(runs, Shape(8192, 16))})
    rows = [row for row in made["one_gpu"] if row["shape"] == "Qwen3-8B bf16"]
    assert rows == [
        {
            "shape": "Qwen3-8B bf16",
            "tokens": 8400,
            "off": 1200,
            "on": 120,
            "prefill_on": 96,
            "pull": 7,
        }
    ]
    others = [row for row in MEASURED["one_gpu"] if row["shape"] != "Qwen3-8B bf16"]
    assert made["one_gpu"][1:] == others
    assert made["two_gpus"] == MEASURED["two_gpus"]


def test_two_gpus_have_the_bare_protocol_and_eight_at_once_their_turns() -> None:
    two = part({"two-gpus-24576": ("on", "off", "bare-on")}, Shape(24576, 16))
    eight = part({"eight": ("on", "off"), "eight-traffic": ("on", "off")}, Shape(4096, turns=3))
    made = updated(MEASURED, {"two-gpus": two, "crowd": eight})
    assert made["two_gpus"] == [{"tokens": 24800, "off": 1200, "on": 120, "bare": 120}]
    assert [(row["traffic"], row["turn"]) for row in made["eight_at_once"]] == [
        (False, 2),
        (False, 3),
        (True, 2),
        (True, 3),
    ]


def test_turns_that_failed_are_left_out() -> None:
    found = part({"q8-8192": ("on", "off")}, Shape(8192, 16))
    for sample in found["samples"]["q8-8192"]["samples"][::2]:
        sample["result"] = None
    assert updated(MEASURED, {"q8": found})["one_gpu"][0]["tokens"] == 8400


def test_the_file_is_rewritten_in_its_own_form_and_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "measured.json"
    data.write_text(DATA.read_text())
    monkeypatch.setattr(medians, "DATA", data)
    medians.main([str(tmp_path / "nothing")])
    assert data.read_text() == DATA.read_text()
    out = tmp_path / "out"
    out.mkdir()
    (out / "q8.json").write_text(json.dumps(part({"q8-8192": ("on", "off")}, Shape(8192, 16))))
    medians.main([str(out)])
    measured = json.loads(data.read_text())
    assert measured != MEASURED
    pytest.importorskip("matplotlib")
    assert len(draw(tmp_path / "charts", measured)) == 5


def test_the_samples_of_a_run_are_written_before_the_next_one_begins() -> None:
    written: list[dict[str, Any]] = []
    found = Outcome(kept=lambda outcome: written.append(copy.deepcopy(outcome.records())))
    sample = Sample(Shape(100), "on", 0, 0, 2, dataclasses.replace(result(), record_id="r"))
    found.keep("first", Run((sample,), ()))
    assert [list(records["samples"]) for records in written] == [["first"]]
    (kept,) = written[0]["samples"]["first"]["samples"]
    assert kept["result"]["record_id"] == "r"
