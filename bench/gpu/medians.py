"""Takes the medians of a run into measured.json: python -m bench.gpu.medians OUT...

OUT is a folder that `bench.gpu.run` wrote, with the samples of each part in PART.json. Rows
of parts and contexts that are not there stay as they were. Runs with turns that should have
reused and did not are refused, and told of. Then `python -m bench.gpu.charts` draws them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.gpu.added import OWN
from bench.gpu.charts import DATA
from bench.gpu.reuse import missed_in_file
from kvloop.bench.stats import percentile

_ONE_GPU = {"short": "Qwen3-8B bf16", "q8": "Qwen3-8B bf16", "q32": "Qwen3-32B fp8"}
"""Shapes of parts; where two parts have the same row, that of the later one is taken."""
_TAKEN = (*_ONE_GPU, "two-gpus", "crowd")
_Sample = Mapping[str, Any]
_Row = dict[str, Any]


def updated(measured: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The medians with those of some parts put in their place.

    Args:
        measured: content of measured.json.
        parts: content of PART.json by the name of the part.
    """
    made = dict(measured)
    fresh = [row for name in _ONE_GPU if name in parts for row in _one_gpu(name, parts[name])]
    if fresh:
        order = list(_ONE_GPU.values())
        by_shape = {(order.index(r["shape"]), r["tokens"]): r for r in measured["one_gpu"] + fresh}
        made["one_gpu"] = [by_shape[key] for key in sorted(by_shape)]
    if "two-gpus" in parts and (rows := list(_two_gpus(parts["two-gpus"]))):
        by_tokens = {row["tokens"]: row for row in measured["two_gpus"] + rows}
        made["two_gpus"] = [by_tokens[tokens] for tokens in sorted(by_tokens)]
    if "crowd" in parts and (rows := list(_eight(parts["crowd"]))):
        by_turn = {(r["traffic"], r["turn"]): r for r in measured["eight_at_once"] + rows}
        made["eight_at_once"] = [by_turn[turn] for turn in sorted(by_turn)]
    return made


def refused(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The runs whose medians are not taken for those of reuse, one sentence each.

    Args:
        parts: content of PART.json by the name of the part.
    """
    return [
        f"{part}: {name} is refused: {len(missed)} turns did not reuse "
        f"({', '.join(sorted(set(missed.values())))})"
        for part, found in parts.items()
        if part in _TAKEN
        for name, run in found["samples"].items()
        if (missed := missed_in_file(run))
    ]


def _one_gpu(part: str, found: Mapping[str, Any]) -> Iterator[_Row]:
    for samples in _contexts(found):
        on = samples["on"]
        yield {
            "shape": _ONE_GPU[part],
            "tokens": _tokens(on),
            "off": _ms(samples["off"], "ttft_seconds"),
            "on": _ms(on, "ttft_seconds"),
            "prefill_on": _ms(on, "prefill_leg_seconds"),
            "pull": _ms(on, "pull_seconds"),
        }


def _two_gpus(found: Mapping[str, Any]) -> Iterator[_Row]:
    for samples in _contexts(found):
        ways = {"off": "off", "on": "on", "bare": OWN}
        times = {name: _ms(samples[way], "ttft_seconds") for name, way in ways.items()}
        yield {"tokens": _tokens(samples["on"]), **times}


def _eight(found: Mapping[str, Any]) -> Iterator[_Row]:
    for run, traffic in (("eight", False), ("eight-traffic", True)):
        samples = _reusing(found["samples"].get(run, {"samples": []}))
        for turn in (2, 3):
            ways = _by_way(sample for sample in samples if sample["turn"] == turn)
            if {"on", "off"} <= set(ways):
                times = {way: _ms(ways[way], "ttft_seconds") for way in ("off", "on")}
                yield {"traffic": traffic, "turn": turn, **times}


def _contexts(found: Mapping[str, Any]) -> Iterator[dict[str, list[_Sample]]]:
    """The last turns of the runs named after a context, by way."""
    for name, run in found["samples"].items():
        if name.rpartition("-")[2].isdigit():
            ways = _by_way(s for s in _reusing(run) if s["turn"] == s["shape"]["turns"])
            if {"on", "off"} <= set(ways):
                yield ways


def _reusing(run: Mapping[str, Any]) -> list[_Sample]:
    """The samples of a run; none if a turn of it should have reused and did not."""
    return [] if missed_in_file(run) else run["samples"]


def _by_way(samples: Iterable[_Sample]) -> dict[str, list[_Sample]]:
    ways: dict[str, list[_Sample]] = {}
    for sample in samples:
        if sample["result"] is not None:
            ways.setdefault(sample["variant"], []).append(sample)
    return ways


def _tokens(samples: list[_Sample]) -> int:
    """Tokens of the prompt, to the hundred."""
    return int(round(percentile([s["result"]["prompt_tokens"] for s in samples], 0.5), -2))


def _ms(samples: list[_Sample], time: str) -> int | None:
    known = [value for s in samples if (value := s["result"][time]) is not None]
    return round(percentile(known, 0.5) * 1e3) if known else None


def main(folders: list[str]) -> int:
    """Rewrite measured.json with what lies in some folders; 1 if a run is refused."""
    found = {path.stem: path for folder in folders for path in sorted(Path(folder).glob("*.json"))}
    parts = {name: json.loads(path.read_text()) for name, path in found.items()}
    measured = updated(json.loads(DATA.read_text()), parts)
    lines = ['{\n "source": ' + json.dumps(measured.pop("source"))]
    for name, rows in measured.items():
        rows_text = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
        lines.append(f' "{name}": [\n  {rows_text}\n ]')
    DATA.write_text(",\n".join(lines) + "\n}\n")
    told = refused(parts)
    sys.stderr.writelines(f"{sentence}\n" for sentence in told)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
