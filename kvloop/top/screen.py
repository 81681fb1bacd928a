"""Draws the parts of the status page for a terminal. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvloop.top.feed import Parts

_SPARKS = "▁▂▃▄▅▆▇█"
_Row = Mapping[str, Any]


def screen(parts: Parts, *, height: int) -> RenderableType:
    """The whole picture.

    Args:
        parts: as the feed gives them; missing ones have not come yet.
        height: lines that there are.
    """
    turns: Sequence[_Row] = parts.get("turns", [])
    workers: Sequence[_Row] = parts.get("workers", [])
    found: _Row = parts.get("conversations", {"shown": [], "more": False})
    room = max(height - 12 - len(workers), 8)
    drawn: list[RenderableType] = [headline(turns, parts.get("figures", []), workers)]
    if not parts.get("ledger", {}).get("reachable", True):
        drawn.append(Text("kvmeta does not answer: turns recompute their whole prompt", "bold red"))
    drawn += [
        _workers(workers),
        _turns(turns[: room // 2]),
        _conversations(found["shown"][: room - room // 2], len(found["shown"]), found["more"]),
    ]
    return Group(*drawn)


def headline(
    turns: Sequence[_Row], figures: Sequence[_Row], workers: Sequence[_Row]
) -> RenderableType:
    """Hit rate, TTFT, saved tokens and retained KV, with their course."""
    follow = [turn for turn in turns if turn["is_followup"]]
    hits = sum(turn["handle_hit"] for turn in follow)
    ttfts = sorted(turn["ttft"] for turn in turns if turn["ttft"] is not None)
    decode = [worker for worker in workers if worker["role"] == "decode"]
    blocks = sum(worker["kv_blocks"] for worker in decode)
    retained = sum(worker["retained_blocks"] or 0 for worker in decode)
    saved = sum(one["pulled"] + one["cached"] for one in figures)
    tokens = saved + sum(one["recomputed"] for one in figures)
    table = Table.grid(padding=(0, 3))
    table.add_row(
        _figure("got their KV back", f"{hits / len(follow):.0%}" if follow else "-"),
        _figure("TTFT, median", duration(ttfts[len(ttfts) // 2]) if ttfts else "-"),
        _figure("prompt not computed", f"{saved / tokens:.0%}" if tokens else "-"),
        _figure("KV retained", f"{retained / blocks:.0%}" if blocks else "-"),
    )
    table.add_row(
        sparkline([one["hit_rate"] for one in figures], top=1.0),
        sparkline([one["ttft_p50"] for one in figures]),
    )
    return table


def sparkline(values: Sequence[float | None], *, width: int = 24, top: float | None = None) -> str:
    """The last values as a row of bars; a gap where there is none."""
    shown = values[-width:]
    high = top or max((value for value in shown if value is not None), default=0) or 1.0
    last = len(_SPARKS) - 1
    return "".join(
        " " if value is None else _SPARKS[min(int(value / high * last + 0.5), last)]
        for value in shown
    )


def duration(seconds: float | None) -> str:
    """Seconds in the unit that fits."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _figure(name: str, value: str) -> Text:
    return Text.assemble((value, "bold cyan"), " ", (name, "dim"))


def _workers(workers: Sequence[_Row]) -> RenderableType:
    table = Table("worker", "leg", "model", "state", box=SIMPLE_HEAD)
    table.add_column("in flight", justify="right")
    table.add_column("retained", justify="right")
    for worker in workers:
        good = worker["state"] == "active"
        retained = "-"
        if worker["role"] == "decode" and worker["retained_blocks"] is not None:
            share = worker["retained_blocks"] / max(worker["kv_blocks"], 1)
            retained = f"{worker['retained_blocks']:,} blocks ({share:.0%})"
        table.add_row(
            Text(worker["worker_id"]),
            worker["role"],
            Text(worker["model"]),
            Text(worker["state"], "" if good else "red"),
            str(worker["in_flight"]),
            retained,
        )
    return table if workers else Text("no worker is registered; `kvloop doctor` says why", "dim")


def _turns(turns: Sequence[_Row]) -> RenderableType:
    table = Table("ended", "conversation", box=SIMPLE_HEAD)
    for name in ("turn", "prompt", "pulled", "cached", "computed", "TTFT"):
        table.add_column(name, justify="right")
    table.add_column("what happened")
    for turn in turns:
        ended = datetime.fromtimestamp(turn["started"] + turn["total_seconds"])
        said = turn["error"] or turn["miss_reason"] or turn["outcome"]
        table.add_row(
            f"{ended:%H:%M:%S}",
            Text(turn["conversation_id"] or "-", overflow="ellipsis", no_wrap=True),
            str(turn["number"] or "-"),
            f"{turn['prompt_tokens']:,}",
            f"{turn['pulled']:,}",
            f"{turn['cached']:,}",
            f"{turn['recomputed']:,}",
            duration(turn["ttft"]),
            Text(said.lower().replace("_", " "), "red" if turn["outcome"] == "failed" else ""),
        )
    return table if turns else Text("no turn has ended yet", "dim")


def _conversations(shown: Sequence[_Row], known: int, more: bool) -> RenderableType:
    table = Table("conversation", "state", box=SIMPLE_HEAD)
    for name in ("turn", "tokens", "blocks"):
        table.add_column(name, justify="right")
    table.add_column("held by")
    table.add_column("left", justify="right")
    for one in shown:
        table.add_row(
            Text(one["conversation_id"], overflow="ellipsis", no_wrap=True),
            one["state"],
            str(one["turn"]),
            f"{one['tokens']:,}",
            f"{one['blocks']:,}",
            Text(one["worker_id"]),
            duration(one["remaining"]),
        )
    if not shown:
        return Text("no conversation is retained", "dim")
    if known > len(shown) or more:
        table.caption = f"the last {len(shown)} of {known}{' or more' if more else ''}"
    return table
