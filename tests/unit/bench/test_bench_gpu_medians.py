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
from bench.gpu.medians import refused, updated
from bench.gpu.outcome import Outcome
from kvloop.bench.samples import Run, Sample, Shape
from tests.unit.bench.fakes import result

MEASURED: dict[str, Any] = json.loads(DATA.read_text())


def part(
    runs: dict[str, tuple[str, ...]], shape: Shape, miss_reason: str | None = None
) -> dict[str, Any]:
    """A part's file: every turn of every way, off ten times as slow as others."""
    found = Outcome()
    for name, ways in runs.items():
        samples = []
        for way in ways:
            for repetition, factor in enumerate((1.0, 1.2, 5.0)):
                for turn in range(1, shape.turns + 1):
                    ttft = (1.0 if way.endswith("off") else 0.1) * factor
                    taken = result(
                        ttft=ttft,
                        prompt=shape.largest_prompt,
                        pulled=50,
                        pull_seconds=0.007,
                        miss_reason=miss_reason if (way, repetition) == ("on", 1) else None,
                    )
                    samples.append(Sample(shape, way, repetition, 0, turn, taken))
        found.keep(name, Run(tuple(samples), ()))
    written: dict[str, Any] = json.loads(json.dumps(found.records()))
    return written


def _q8(measured: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {r["tokens"]: r for r in measured["one_gpu"] if r["shape"] == "Qwen3-8B bf16"}


@pytest.mark.parametrize("name", ["q8", "short"])
def test_a_run_on_one_gpu_replaces_the_rows_of_its_shape_and_contexts_alone(name: str) -> None:
    runs = {"q8-8192": ("on", "off", "bare-on"), "q8-after-1-s": ("on", "bare-on")}
    made = updated(MEASURED, {name: part(runs, Shape(8192, 16))})
    assert _q8(made) == _q8(MEASURED) | {
        8400: {
            "shape": "Qwen3-8B bf16",
            "tokens": 8400,
            "off": 1200,
            "on": 120,
            "prefill_on": 96,
            "pull": 7,
        }
    }
    assert len(made["one_gpu"]) == len(MEASURED["one_gpu"])
    assert made["one_gpu"][1:] == MEASURED["one_gpu"][1:]
    assert made["two_gpus"] == MEASURED["two_gpus"]


def test_a_run_with_a_turn_that_did_not_reuse_is_refused_and_told() -> None:
    good = part({"q8-8192": ("on", "off")}, Shape(8192, 16))
    missed = part({"q8-32768": ("on", "off")}, Shape(32768, 16), miss_reason="EVICTED")
    found = {"samples": {**good["samples"], **missed["samples"]}}
    made = updated(MEASURED, {"q8": found})
    assert _q8(made)[8400]["on"] == 120
    assert _q8(made)[33000] == _q8(MEASURED)[33000]
    (told,) = refused({"q8": found, "guard": missed})
    assert told == "q8: q8-32768 is refused: 1 turns did not reuse (EVICTED)"


def test_a_file_with_refused_runs_ends_in_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "measured.json"
    data.write_text(DATA.read_text())
    monkeypatch.setattr(medians, "DATA", data)
    out = tmp_path / "out"
    out.mkdir()
    missed = part({"eight": ("on", "off")}, Shape(4096), miss_reason="EVICTED")
    (out / "crowd.json").write_text(json.dumps(missed))
    assert medians.main([str(out)]) == 1
    assert data.read_text() == DATA.read_text()
    assert "crowd: eight is refused" in capsys.readouterr().err


def test_two_gpus_have_the_bare_protocol_and_eight_at_once_their_turns() -> None:
    two = part({"two-gpus-24576": ("on", "off", "own-on")}, Shape(24576, 16))
    eight = part({"eight": ("on", "off"), "eight-traffic": ("on", "off")}, Shape(4096, turns=3))
    made = updated(MEASURED, {"two-gpus": two, "crowd": eight})
    others = [row for row in MEASURED["two_gpus"] if row["tokens"] != 24800]
    fresh = {"tokens": 24800, "off": 1200, "on": 120, "bare": 120}
    assert made["two_gpus"] == [fresh, *others]
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
    assert medians.main([str(tmp_path / "nothing")]) == 0
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
