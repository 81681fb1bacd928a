"""Writes a run's samples and cells as JSON and CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvloop.bench.cells import Cell, gain
from kvloop.bench.outputs import OutputCheck
from kvloop.bench.samples import Run
from kvloop.bench.slowdown import Slowdown

_DISTRIBUTIONS = ("ttft", "prefill_leg", "decode_leg", "outside_legs", "itl")
_COUNTS = (
    "prompt_tokens",
    "pulled_tokens",
    "cached_tokens",
    "recomputed_tokens",
    "retained_tokens",
    "retained_blocks",
    "failures",
)


def write_json(
    path: Path,
    run: Run,
    found: Sequence[Cell],
    checks: Sequence[OutputCheck],
    conditions: Mapping[str, Any],
    slowdown: Slowdown | None = None,
) -> None:
    """Write everything there is.

    Args:
        path: file to write.
        run: all samples; their token ids are left out.
        found: its cells.
        checks: its comparison of answers.
        conditions: under which it was run.
        slowdown: what other requests felt; None if there were none.
    """
    document = {
        "conditions": dict(conditions),
        "cells": [cell_record(cell, found) for cell in found],
        "outputs": [asdict(check) for check in checks],
        "traffic": slowdown.record() if slowdown is not None else None,
        "kv_blocks": asdict(run.blocks) if run.blocks is not None else None,
        **sample_records(run),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def write_csv(path: Path, found: Sequence[Cell]) -> None:
    """Write the cells, one a line. Times are in seconds."""
    records = [cell_record(cell, found) for cell in found]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]) if records else [])
        writer.writeheader()
        writer.writerows(records)


def cell_record(cell: Cell, found: Sequence[Cell]) -> dict[str, Any]:
    """One cell as a flat record, the same keys for every cell. Times are in seconds."""
    record: dict[str, Any] = {
        **{name: getattr(cell.shape, name) for name in cell.shape.__dataclass_fields__},
        "turn": cell.turn,
        "context_up_to": cell.key.context,
        "variant": cell.variant,
        "ratio": gain(found, cell),
    }
    for name in _DISTRIBUTIONS:
        value = getattr(cell, name)
        for statistic in ("count", "least", "p50", "p90", "p99", "most"):
            record[f"{name}_{statistic}"] = getattr(value, statistic) if value else None
    record |= {name: getattr(cell, name) for name in _COUNTS}
    record |= {
        "tokens_per_second": cell.tokens_per_second,
        "pulls": cell.transfers.count if cell.transfers else None,
        "pulled_bytes": cell.pulled_bytes,
        "pull_seconds": cell.transfer_seconds,
        "pull_post_seconds": cell.transfers.post_seconds if cell.transfers else None,
        "pull_descriptors": cell.transfers.descriptors if cell.transfers else None,
        "pull_bytes_per_second": cell.bytes_per_second,
        "compute_seconds": cell.compute_seconds,
        "misses": " ".join(f"{reason}={count}" for reason, count in sorted(cell.misses.items())),
    }
    return record


def sample_records(run: Run) -> dict[str, list[dict[str, Any]]]:
    """All samples, with the number of tokens in place of the tokens."""
    return {
        "samples": [_without_tokens(asdict(sample)) for sample in run.samples],
        "rounds": [asdict(sample) for sample in run.rounds],
    }


def _without_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["result"] is not None:
        sample["result"]["token_ids"] = len(sample["result"]["token_ids"])
    return sample
