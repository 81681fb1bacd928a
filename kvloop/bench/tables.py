"""The table that a run ends in."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvloop.bench.cells import LATER_TURNS, Cell, gain
from kvloop.bench.outputs import OutputCheck
from kvloop.bench.samples import Shape
from kvloop.bench.slowdown import Slowdown
from kvloop.bench.stats import Distribution

_COLUMNS = (
    "context",
    "load",
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
    "rest",
    "ITL p50",
    "pulled",
    "cached",
    "computed",
    "GB/s",
    "tok/s",
    "retained",
    "n",
)
_CAPTION = (
    "times in ms; load: conversations at once, or how they come; ratio: TTFT off over this "
    "row's; rest: of TTFT outside both legs; retained: KV blocks on decode at most"
)


def ttft_table(found: Sequence[Cell]) -> Table:
    """All cells. Times are in milliseconds."""
    table = Table(box=SIMPLE_HEAD, caption=_CAPTION, collapse_padding=True, pad_edge=False)
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


def slowdown_lines(found: Slowdown) -> list[str]:
    """What other requests felt, in words."""
    lines = [
        f"other requests with reuse {name}: ITL p50 {_ms(spread.p50, 1)}, "
        f"p99 {_ms(spread.p99, 1)}, mean {_ms(spread.mean, 2)} ms while turns could reuse"
        for name, spread in (("off", found.off), ("on", found.on))
        if spread is not None
    ]
    if found.share is not None:
        lines.append(f"decode is {abs(found.share):.1%} {_slower(found.share)} with reuse on")
    if found.failures:
        lines.append(f"{found.failures} of the other requests failed")
    return lines


def _slower(share: float) -> str:
    return "slower" if share > 0 else "faster"


def _row(cell: Cell, found: Sequence[Cell]) -> list[str]:
    ttft = cell.ttft
    times = gain(found, cell)
    bandwidth = cell.bytes_per_second
    missing = f" ({cell.failures} failed)" if cell.failures else ""
    return [
        f"{cell.prompt_tokens:,}",
        str(cell.shape.conversations) if isinstance(cell.shape, Shape) else cell.shape.arrivals,
        _turn(cell),
        cell.variant,
        *(_ms(value) for value in _percentiles(ttft)),
        f"{ttft.spread:.0%}" if ttft else "-",
        f"{times:.1f}x" if times is not None and cell.variant != "off" else "-",
        _ms(cell.prefill_leg.p50 if cell.prefill_leg else None),
        _ms(cell.transfer_seconds),
        _ms(cell.decode_leg.p50 if cell.decode_leg else None),
        _ms(cell.outside_legs.p50 if cell.outside_legs else None, digits=1),
        _ms(cell.itl.p50 if cell.itl else None, digits=1),
        f"{cell.pulled_tokens:,}",
        f"{cell.cached_tokens:,}",
        f"{cell.recomputed_tokens:,}",
        f"{bandwidth / 1e9:.1f}" if bandwidth is not None else "-",
        f"{cell.tokens_per_second:,.0f}" if cell.tokens_per_second else "-",
        f"{cell.retained_blocks:,}" if cell.retained_blocks is not None else "-",
        f"{ttft.count if ttft else 0}{missing}",
    ]


def _turn(cell: Cell) -> str:
    """The turn, or which turns the row gathers."""
    if cell.turn != LATER_TURNS:
        return str(cell.turn)
    return "2+" if cell.key.context is None else f"2+, to {cell.key.context:,}"


def _percentiles(found: Distribution | None) -> tuple[float | None, ...]:
    return (found.p50, found.p90, found.p99) if found else (None, None, None)


def _ms(seconds: float | None, digits: int = 0) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.{digits}f}"
