"""Takes the medians of a run into measured.json: python -m bench.gpu.medians OUT...

OUT is a folder that `bench.gpu.run` wrote, with the samples of each part in PART.json. Rows
of parts that are not there stay as they were. Then `python -m bench.gpu.charts` draws them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.gpu.charts import DATA
from kvloop.bench.stats import percentile

_ONE_GPU = {"q8": "Qwen3-8B bf16", "q32": "Qwen3-32B fp8"}
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
        shapes = {row["shape"] for row in fresh}
        kept = [row for row in measured["one_gpu"] if row["shape"] not in shapes]
        order = list(_ONE_GPU.values())
        made["one_gpu"] = sorted(
            kept + fresh, key=lambda row: (order.index(row["shape"]), row["tokens"])
        )
    if "two-gpus" in parts and (rows := list(_two_gpus(parts["two-gpus"]))):
        made["two_gpus"] = rows
    if "crowd" in parts and (rows := list(_eight(parts["crowd"]))):
        made["eight_at_once"] = rows
    return made


def _one_gpu(part: str, found: Mapping[str, Any]) -> Iterator[_Row]:
    for samples in _contexts(part, found):
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
    for samples in _contexts("two-gpus", found):
        ways = {"off": "off", "on": "on", "bare": "bare-on"}
        times = {name: _ms(samples[way], "ttft_seconds") for name, way in ways.items()}
        yield {"tokens": _tokens(samples["on"]), **times}


def _eight(found: Mapping[str, Any]) -> Iterator[_Row]:
    for run, traffic in (("eight", False), ("eight-traffic", True)):
        samples = found["samples"].get(run, {}).get("samples", [])
        for turn in (2, 3):
            ways = _by_way(sample for sample in samples if sample["turn"] == turn)
            if {"on", "off"} <= set(ways):
                times = {way: _ms(ways[way], "ttft_seconds") for way in ("off", "on")}
                yield {"traffic": traffic, "turn": turn, **times}


def _contexts(part: str, found: Mapping[str, Any]) -> Iterator[dict[str, list[_Sample]]]:
    """The last turns of the runs named after a context, by way."""
    for name, run in found["samples"].items():
        if name.removeprefix(f"{part}-").isdigit():
            ways = _by_way(s for s in run["samples"] if s["turn"] == s["shape"]["turns"])
            if {"on", "off"} <= set(ways):
                yield ways


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


def main(folders: list[str]) -> None:
    """Rewrite measured.json with what lies in some folders."""
    found = {path.stem: path for folder in folders for path in sorted(Path(folder).glob("*.json"))}
    parts = {name: json.loads(path.read_text()) for name, path in found.items()}
    measured = updated(json.loads(DATA.read_text()), parts)
    lines = ['{\n "source": ' + json.dumps(measured.pop("source"))]
    for name, rows in measured.items():
        rows_text = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
        lines.append(f' "{name}": [\n  {rows_text}\n ]')
    DATA.write_text(",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
