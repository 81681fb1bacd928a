"""Medians over rounds, as a table and as records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from bench.relay.cases import WAYS, Round

PATH = ("router", "prefill sidecar", "decode sidecar", "kvmeta")
"""The processes of kvloop."""
_FRONTS = {
    "baseline": ("baseline",),
    "http": ("router",),
    "grpc": ("router",),
    "alone": ("router alone",),
}


def records(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """One record for each case and way."""
    cases = dict.fromkeys(each.case for each in rounds)
    found = []
    for case in cases:
        of_case = [each for each in rounds if each.case == case]
        alone = [each.ttft for each in of_case if each.way == "decode"]
        bare = [each.ttft for each in of_case if each.way == "bare"]
        legs = [each.ttft for each in of_case if each.way == "legs"]
        for way in WAYS:
            of_way = [each for each in of_case if each.way == way]
            if of_way:
                fakes = way in ("legs", "alone")  # other engines stand behind these
                found.append(
                    _record(case, way, of_way, [] if fakes else alone, legs if fakes else bare)
                )
    return found


def table(found: Sequence[dict[str, Any]]) -> Table:
    """The records for people."""
    made = Table(title="medians over rounds (least to most)")
    for heading in (
        *("case", "way", "TTFT ms", "added to decode alone", "added to bare/legs", "ITL ms"),
        *("front µs/token", "path µs/token", "front ms/request", "path ms/request"),
        *("tokens/s per core", "router MiB"),
    ):
        made.add_column(heading, justify="right")
    for record in found:
        per_token = record["front_us_per_token"]["median"]
        made.add_row(
            record["case"],
            record["way"],
            _span(record["ttft_ms"]),
            *(
                f"{record[name]:+.2f}" if record[name] is not None else ""
                for name in ("added_to_decode_ms", "added_to_bare_ms")
            ),
            f"{record['itl_ms']:.2f}",
            _span(record["front_us_per_token"]),
            _span(record["path_us_per_token"]),
            _span(record["front_ms_per_request"]),
            _span(record["path_ms_per_request"]),
            f"{1e6 / per_token:,.0f}" if per_token else "",
            f"{record['memory_mib']:.0f}" if record["memory_mib"] else "",
        )
    return made


def _record(
    case: str, way: str, rounds: Sequence[Round], alone: Sequence[float], bare: Sequence[float]
) -> dict[str, Any]:
    front = _FRONTS.get(way, ())
    path = PATH if way in ("http", "grpc") else front
    ttft = statistics.median(each.ttft for each in rounds)

    def added(to: Sequence[float]) -> float | None:
        return (ttft - statistics.median(to)) * 1e3 if to else None

    def cpu(names: Sequence[str], count: Callable[[Round], int], scale: float) -> dict[str, float]:
        return _spread(
            [sum(each.cpu[name] for name in names) / count(each) * scale for each in rounds]
        )

    return {
        "case": case,
        "way": way,
        "rounds": len(rounds),
        "ttft_ms": _spread([each.ttft * 1e3 for each in rounds]),
        "added_to_decode_ms": added(alone) if way != "decode" else None,
        "added_to_bare_ms": added(bare) if way not in ("decode", "bare", "legs") else None,
        "itl_ms": statistics.median([g * 1e3 for each in rounds for g in each.gaps] or [0.0]),
        "front_us_per_token": cpu(front, lambda each: each.tokens, 1e6),
        "path_us_per_token": cpu(path, lambda each: each.tokens, 1e6),
        "front_ms_per_request": cpu(front, lambda each: each.requests, 1e3),
        "path_ms_per_request": cpu(path, lambda each: each.requests, 1e3),
        "cpu_ms_per_request": {
            name: cpu((name,), lambda each: each.requests, 1e3)["median"] for name in path
        },
        "tokens_per_second": _spread([each.tokens / each.seconds for each in rounds]),
        "memory_mib": max((each.memory[name] for each in rounds for name in front), default=0.0),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _span(spread: dict[str, float]) -> str:
    if not spread["most"]:
        return ""
    return f"{spread['median']:.2f} ({spread['least']:.2f} to {spread['most']:.2f})"
