"""Draws a run's cells. Needs matplotlib: `pip install 'kvloop[bench]'`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloop.bench.cells import LATER_TURNS, Cell
from kvloop.bench.samples import Load, Shape
from kvloop.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"off": "#b0493b", "on": "#2f6f9f", "control": "#8a8a8a"}
_NAMES = {"off": "recomputed", "on": "with reuse", "control": "recomputed once more"}
_INCHES = (7.0, 4.2)


def write_charts(folder: Path, found: Sequence[Cell], suffix: str = "svg") -> list[Path]:
    """Draw what the cells hold; a chart without data is left out.

    Args:
        folder: where to write; it must exist.
        found: all cells.
        suffix: "svg" or "png".

    Returns:
        The files written.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UnsupportedError("charts need matplotlib: pip install 'kvloop[bench]'") from error
    written = []
    for name, draw in (
        ("ttft-by-context", _ttft_by_context),
        ("ttft-by-turn", _ttft_by_turn),
        ("prefill-split", _prefill_split),
    ):
        figure = Figure(figsize=_INCHES, layout="constrained")
        if draw(figure.add_subplot(), found):
            path = folder / f"{name}.{suffix}"
            figure.savefig(path, dpi=150)
            written.append(path)
    return written


def _ttft_by_context(axes: Axes, found: Sequence[Cell]) -> bool:
    """Turns that can reuse: one line for each variant over the prompt's length."""
    return _lines(
        axes,
        [cell for cell in found if cell.is_last],
        lambda cell: cell.prompt_tokens,
        title="Time to the first token with a conversation's KV at hand",
        label="tokens in the prompt",
    )


def _ttft_by_turn(axes: Axes, found: Sequence[Cell]) -> bool:
    """The longest conversation, or the workload: one line for each variant over its turns."""
    if not found:
        return False
    longest = max((cell.shape for cell in found), key=_length)
    words = (
        f"from {longest.context_tokens:,} tokens" if isinstance(longest, Shape) else longest.name
    )
    return _lines(
        axes,
        [cell for cell in found if cell.shape == longest and cell.turn != LATER_TURNS],
        lambda cell: cell.turn,
        title=f"Time to the first token, turn by turn, {words}",
        label="turn",
    )


def _length(load: Load) -> int:
    return load.largest_prompt if isinstance(load, Shape) else load.turns


def _lines(axes: Axes, found: Sequence[Cell], position: Any, *, title: str, label: str) -> bool:
    drawn = False
    for variant in dict.fromkeys(cell.variant for cell in found):
        points = sorted(
            (position(cell), cell.ttft.p50 * 1e3, cell.ttft.least * 1e3, cell.ttft.most * 1e3)
            for cell in found
            if cell.variant == variant and cell.ttft is not None
        )
        if not points:
            continue
        at, median, least, most = zip(*points, strict=True)
        below = [m - low for m, low in zip(median, least, strict=True)]
        above = [high - m for m, high in zip(median, most, strict=True)]
        axes.errorbar(
            at,
            median,
            yerr=[below, above],
            marker="o",
            capsize=3,
            color=_COLOURS.get(variant),
            label=_NAMES.get(variant, variant),
        )
        drawn = True
    axes.set_title(title)
    axes.set_xlabel(label)
    _finish(axes)
    return drawn


def _prefill_split(axes: Axes, found: Sequence[Cell]) -> bool:
    """Turns that can reuse: the prefill leg by length and variant, computing under pulling."""
    last = [cell for cell in found if cell.is_last and cell.compute_seconds is not None]
    if not any(cell.transfer_seconds for cell in last):
        return False
    labels = [f"{cell.prompt_tokens:,}\n{_NAMES.get(cell.variant, cell.variant)}" for cell in last]
    places = list(range(len(last)))
    computing = [(cell.compute_seconds or 0.0) * 1e3 for cell in last]
    pulling = [(cell.transfer_seconds or 0.0) * 1e3 for cell in last]
    axes.bar(places, computing, color=_COLOURS["off"], label="computing and the rest")
    axes.bar(places, pulling, bottom=computing, color=_COLOURS["on"], label="pulling KV")
    axes.set_xticks(places, labels, fontsize="small")
    axes.set_title("Where the prefill leg goes")
    _finish(axes)
    return True


def _finish(axes: Axes) -> None:
    axes.set_ylabel("ms, median (bars: least and most)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
