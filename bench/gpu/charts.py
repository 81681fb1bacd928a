"""Draws docs/benchmarks.md's charts: python -m bench.gpu.charts [FOLDER].

From measured.json, which holds the medians of that page's tables. Needs matplotlib
(`pip install 'kvloop[bench]'`). The same data give the same files, byte for byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DATA = Path(__file__).with_name("measured.json")
FOLDER = Path(__file__).parents[2] / "docs" / "charts"
_OFF, _ON, _BARE = "#b0493b", "#2f6f9f", "#8a8a8a"
_INCHES = (7.0, 3.8)
_BAR = 0.38
_LEGEND_COLUMNS = 2
_Row = Mapping[str, Any]


def draw(folder: Path, measured: Mapping[str, Any]) -> list[Path]:
    """Write all charts.

    Args:
        folder: made if it is not there.
        measured: the content of measured.json.

    Returns:
        The files written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    charts: dict[str, Callable[[Axes], None]] = {
        "one-gpu-ttft": lambda axes: _one_gpu(axes, measured["one_gpu"]),
        "one-gpu-prefill": lambda axes: _prefill(axes, measured["one_gpu"]),
        "one-gpu-turns": lambda axes: _turns(axes, measured["eight_at_once"]),
        "two-gpus-ttft": lambda axes: _two_gpus(axes, measured["two_gpus"]),
        "kv-layouts": lambda axes: _layouts(axes, measured["kv_layouts"]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvloop", "font.size": 9}):
        for name, fill in charts.items():
            figure = Figure(figsize=_INCHES, layout="constrained")
            axes = figure.add_subplot()
            fill(axes)
            axes.set_ylabel("ms, median")
            axes.grid(axis="y", alpha=0.3)
            axes.margins(y=0.12)  # room for the values on top of bars
            figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS, frameon=False)
            written.append(folder / f"{name}.svg")
            figure.savefig(written[-1], metadata={"Date": None})
    return written


def _one_gpu(axes: Axes, rows: Sequence[_Row]) -> None:
    """Lines over the context, a dashed one for the larger model."""
    for shape, style in zip(dict.fromkeys(row["shape"] for row in rows), "-:", strict=False):
        found = [row for row in rows if row["shape"] == shape]
        at = [row["tokens"] for row in found]
        for name, colour, words in (("off", _OFF, "recomputed"), ("on", _ON, "with reuse")):
            axes.plot(
                at,
                [row[name] for row in found],
                linestyle=style,
                marker="o",
                color=colour,
                label=f"{shape}, {words}",
            )
    axes.set_yscale("log")
    axes.set_title("Time to the first token, one H200, prefill cold (log scale)")
    axes.set_xlabel("tokens in the prompt")


def _prefill(axes: Axes, rows: Sequence[_Row]) -> None:
    """With reuse: the prefill leg, computing under pulling."""
    computing = [row["prefill_on"] - row["pull"] for row in rows]
    labels = [f"{row['shape']}\n{row['tokens'] / 1000:g}k" for row in rows]
    places = list(range(len(rows)))
    axes.bar(places, computing, color=_OFF, label="computing and the rest")
    axes.bar(places, [row["pull"] for row in rows], bottom=computing, color=_ON, label="pulling KV")
    axes.set_xticks(places, labels)
    axes.set_title("The prefill leg with reuse, one H200")


def _turns(axes: Axes, rows: Sequence[_Row]) -> None:
    _pairs(
        axes,
        rows,
        [f"turn {row['turn']}" + (",\nother requests" if row["traffic"] else "") for row in rows],
    )
    axes.set_title("Eight conversations at once, Qwen3-8B bf16, 4.4k tokens, one H200")


def _two_gpus(axes: Axes, rows: Sequence[_Row]) -> None:
    places = list(range(len(rows)))
    width = _BAR * 2 / 3
    for shift, (name, colour, words) in enumerate(
        (
            ("off", _OFF, "recomputed"),
            ("on", _ON, "with reuse"),
            ("bare", _BARE, "bare protocol with reuse"),
        )
    ):
        _bars(
            axes,
            [place + (shift - 1) * width for place in places],
            [row[name] for row in rows],
            width,
            colour,
            words,
        )
    axes.set_xticks(places, [f"{row['tokens'] / 1000:g}k tokens" for row in rows])
    axes.set_title("Time to the first token, Qwen3-32B bf16, two H200, prefill cold")


def _layouts(axes: Axes, rows: Sequence[_Row]) -> None:
    _pairs(axes, rows, [row["layout"] for row in rows])
    axes.set_title("The bare protocol by KV layout, Qwen3-32B bf16, 24k tokens, two H200")


def _pairs(axes: Axes, rows: Sequence[_Row], labels: Sequence[str]) -> None:
    """Off and on side by side."""
    places = list(range(len(rows)))
    for shift, name, colour, words in (
        (-0.5, "off", _OFF, "recomputed"),
        (0.5, "on", _ON, "with reuse"),
    ):
        at = [place + shift * _BAR for place in places]
        _bars(axes, at, [row[name] for row in rows], _BAR, colour, words)
    axes.set_xticks(places, labels)


def _bars(
    axes: Axes, at: Sequence[float], heights: Sequence[float], width: float, colour: str, words: str
) -> None:
    """Bars with their values on top."""
    axes.bar_label(axes.bar(at, heights, width, color=colour, label=words), fmt="{:,.0f}")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, json.loads(DATA.read_text()))
