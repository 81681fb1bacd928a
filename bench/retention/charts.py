"""Draws what was retained, and what for. Needs matplotlib: `pip install 'kvloop[bench]'`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from bench.retention.runs import Run
from kvloop.errors import UnsupportedError

_PARTS = {
    "read": ("#2f6f9f", "read by the next turn"),
    "overdue": ("#e0a23c", "given up beyond the horizon"),
    "budget": ("#8a8a8a", "gave way to others"),
    "expired": ("#b0493b", "fell at its TTL"),
}


def write_chart(path: Path, runs: Sequence[Run]) -> None:
    """Block-seconds per turn of each arm, by what became of them.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UnsupportedError("charts need matplotlib: pip install 'kvloop[bench]'") from error
    shares = sorted({run.ends_said for run in runs}, reverse=True)
    arms = list(dict.fromkeys(run.arm for run in runs))
    figure = Figure(figsize=(3.2 * len(shares) + 1.5, 4.0), layout="constrained")
    axes = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    for axis, share in zip(axes, shares, strict=True):
        bottoms = [0.0] * len(arms)
        for part, (colour, label) in _PARTS.items():
            heights = [
                mean(
                    getattr(run, part) / run.turns / 1000
                    for run in runs
                    if run.arm == arm and run.ends_said == share
                )
                for arm in arms
            ]
            axis.bar(arms, heights, bottom=bottoms, color=colour, label=label)
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
        axis.set_title(f"end said by {share:.0%} of those not abandoned", fontsize=9)
    axes[0].set_ylabel("thousand block-seconds retained per turn")
    axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=150)
