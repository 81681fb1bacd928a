"""The table that a run ends in."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvloop.bench.cells import Cell, gain
from kvloop.bench.outputs import OutputCheck
from kvloop.bench.stats import Distribution

_COLUMNS = (
    "context",
    "at once",
    "turn",
    "reuse",
    "TTFT p50",
    "p90",
    "p99",
    "spread",
    "ratio",
    "prefill",
    "pull",
    "decode",
    "ITL p50",
    "pulled",
    "cached",
    "recomputed",
    "GB/s",
    "n",
)


def ttft_table(found: Sequence[Cell]) -> Table:
    """All cells. Times are in milliseconds."""
    table = Table(box=SIMPLE_HEAD, caption="times in ms; ratio: TTFT off over this row's")
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for cell in found:
        table.add_row(*_row(cell, found))
    return table


def output_lines(checks: Sequence[OutputCheck]) -> list[str]:
    """What the comparison of answers found, in words."""
    return [
        f"{check.variant}: {check.equal} of {check.compared} answers equal those recomputed"
        + (
            f"; the others part at token {', '.join(map(str, check.first_differences))}"
            if check.first_differences
            else ""
        )
        for check in checks
        if check.compared
    ]


def _row(cell: Cell, found: Sequence[Cell]) -> list[str]:
    ttft = cell.ttft
    times = gain(found, cell)
    bandwidth = cell.transfers.bytes_per_second if cell.transfers else None
    missing = f" ({cell.failures} failed)" if cell.failures else ""
    return [
        f"{cell.prompt_tokens:,}",
        str(cell.shape.conversations),
        str(cell.turn),
        cell.variant,
        *(_ms(value) for value in _percentiles(ttft)),
        f"{ttft.spread:.0%}" if ttft else "-",
        f"{times:.1f}x" if times is not None and cell.variant != "off" else "-",
        _ms(cell.prefill_leg.p50 if cell.prefill_leg else None),
        _ms(cell.transfer_seconds),
        _ms(cell.decode_leg.p50 if cell.decode_leg else None),
        _ms(cell.itl.p50 if cell.itl else None, digits=1),
        f"{cell.pulled_tokens:,}",
        f"{cell.cached_tokens:,}",
        f"{cell.recomputed_tokens:,}",
        f"{bandwidth / 1e9:.1f}" if bandwidth is not None else "-",
        f"{ttft.count if ttft else 0}{missing}",
    ]


def _percentiles(found: Distribution | None) -> tuple[float | None, ...]:
    return (found.p50, found.p90, found.p99) if found else (None, None, None)


def _ms(seconds: float | None, digits: int = 0) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.{digits}f}"
