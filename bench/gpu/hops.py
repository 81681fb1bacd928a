"""Where a turn's time to the first token goes, hop by hop, beside the bare protocol's legs.

Pure functions. Each turn with a trace is paired with the bare turn of the same repetition.
Its hops add up to its time at the client, and what it takes more than the bare one to the
hops outside the engines, plus by how much its two requests to engines took longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.gpu.added import Comparison, bare_pairs
from bench.gpu.engine_times import EngineTimes
from bench.gpu.observed import CLIENT, Book
from bench.gpu.spans import SpanTimes
from kvloop.bench.samples import Run
from kvloop.bench.stats import percentile
from kvloop.bench.turns import TurnResult

_START, _END = "start", "end"
_PREFILL_REQUEST = "P's engine, HTTP and all"
_DECODE_REQUEST = "D's engine, HTTP and all"
_HOPS = (
    # name of the hop; span and point at which it ends
    ("client -> router", "turn", _START),
    ("router, before the ledger", "take_handle", _START),
    ("router -> ledger", "TakeHandle", _START),
    ("ledger", "TakeHandle", _END),
    ("ledger -> router", "take_handle", _END),
    ("router, before prefill", "prefill_leg", _START),
    ("router -> P's sidecar", "prefill", _START),
    ("P's sidecar, before the engine", "prefill", "engine_asked"),
    (_PREFILL_REQUEST, "prefill", "engine_answered"),
    ("P's sidecar, after the engine", "prefill", _END),
    ("P's sidecar -> router", "prefill_leg", _END),
    ("router, before decode", "decode_leg", _START),
    ("router -> D's sidecar", "decode", _START),
    ("D's sidecar, before the engine", "decode", "engine_asked"),
    (_DECODE_REQUEST, "decode", "engine_answered"),
    ("D's sidecar -> router", "decode_leg", "first_chunk"),
    ("router -> client", CLIENT, _END),
)
_ENGINE_HOPS = (_PREFILL_REQUEST, _DECODE_REQUEST)
_SIDES = (("prefill", "P", _PREFILL_REQUEST), ("decode", "D", _DECODE_REQUEST))
_TOLD_OF_ENGINES = ("queue", "prefill", "ttft")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a breakdown; times in milliseconds.

    Attributes:
        name: what took the time.
        added: whether it is part of what kvloop adds; these rows add up.
        count: turns of which it is told.
        p25: first quartile.
        p50: median.
        p75: third quartile.
    """

    name: str
    added: bool
    count: int
    p25: float
    p50: float
    p75: float


def hops(spans: Sequence[SpanTimes]) -> dict[str, float]:
    """Milliseconds of each hop of one turn, in order; they add up to its time at the client.

    A hop that the turn did not take, as to the ledger without reuse, is not there, and
    what little it would have followed on counts for the next one. What went on beside the
    turn's path is no hop: decode's sidecar prepares its request while prefill works, and a
    hop that had ended when the one before it did takes no time. Nothing is told of a turn
    whose legs are not all there.

    Args:
        spans: of one trace, the client's own among them.
    """
    by_name = {span.name: span for span in spans}
    if not {CLIENT, "turn", "prefill", "prefill_leg", "decode", "decode_leg"} <= set(by_name):
        return {}
    at, found = by_name[CLIENT].start_ns, {}
    for name, span_name, point in _HOPS:
        reached = _time(by_name.get(span_name), point)
        if reached is not None:
            found[name] = max(reached - at, 0) / 1e6
            at = max(reached, at)
    return found


def breakdown(run: Run, compared: Comparison, book: Book) -> list[Row]:
    """The rows of one way's turns with a trace, then what engines said of all its turns.

    Args:
        run: rounds with a bare way beside it.
        compared: which way, and with which bare one.
        book: what was seen of the turns.
    """
    pairs = bare_pairs(run, compared)
    whole = [
        (taken, ours, bare)
        for ours, bare in pairs
        if ours.record_id in book.traced and (taken := hops(book.spans(ours.record_id)))
    ]
    rows: list[Row] = []
    for name, _, _ in _HOPS:
        rows += _row(name, name not in _ENGINE_HOPS, (taken.get(name) for taken, _, _ in whole))
        if name in _ENGINE_HOPS:
            bares = [(taken.get(name), _bare_leg(bare, name)) for taken, _, bare in whole]
            rows += _row("  the bare request", False, (leg for _, leg in bares))
            more = (ours - leg for ours, leg in bares if ours is not None)
            rows += _row("  longer than that by", True, more)
    rows += _row("TTFT", False, (ours.ttft_seconds * 1e3 for _, ours, _ in whole))
    rows += _row("TTFT, bare", False, (bare.ttft_seconds * 1e3 for _, _, bare in whole))
    more = ((ours.ttft_seconds - bare.ttft_seconds) * 1e3 for _, ours, bare in whole)
    rows += _row("added", False, more)
    return [*rows, *_around_engines(whole, book), *_of_engines(pairs, book)]


def sum_of_medians(rows: Iterable[Row]) -> float:
    """What the parts of what is added come to; the median of the whole lies beside it."""
    return sum(row.p50 for row in rows if row.added)


def hop_table(columns: Mapping[str, Sequence[Row]]) -> Table:
    """All breakdowns side by side: medians, and quartiles in brackets."""
    table = Table(
        box=SIMPLE_HEAD,
        caption="ms, medians (quartiles); * is part of what kvloop adds",
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("hop", no_wrap=True)
    for name, rows in columns.items():
        count = max((row.count for row in rows if row.added), default=0)
        table.add_column(f"{name}, n={count}", justify="right", no_wrap=True)
    cells = {name: dict(_cells(rows)) for name, rows in columns.items()}
    longest = max(columns.values(), key=len, default=[])
    for key, _ in _cells(longest):
        mark = "*" if key[1] else " "
        table.add_row(f"{mark} {key[0]}", *(cells[name].get(key, "") for name in columns))
    sums = (f"{sum_of_medians(rows):.2f}" for rows in columns.values())
    table.add_row("  sum of medians of *", *sums)
    return table


def _cells(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, bool, int], str]]:
    """A key for each row that tells rows of one name apart, and what it says."""
    met: dict[str, int] = {}
    for row in rows:
        met[row.name] = number = met.get(row.name, 0) + 1
        yield (row.name, row.added, number), f"{row.p50:.2f} ({row.p25:.2f}-{row.p75:.2f})"


def _around_engines(
    whole: Sequence[tuple[Mapping[str, float], TurnResult, TurnResult]], book: Book
) -> Iterator[Row]:
    """Of the requests to engines, what lies before and after the engines' own times."""
    for side, letter, hop in _SIDES:
        around: tuple[list[float], list[float]] = ([], [])
        for taken, ours, bare in whole:
            legs = (taken.get(hop), _bare_leg(bare, hop))
            for leg, result, known in zip(legs, (ours, bare), around, strict=True):
                inside = _engine_time(book, result, side, "ttft")
                if leg is not None and inside is not None:
                    known.append(leg - inside)
        for whose, known in zip(("kvloop", "bare"), around, strict=True):
            yield from _row(f"{letter}'s HTTP around its ttft: {whose}", False, known)


def _of_engines(pairs: Sequence[tuple[TurnResult, TurnResult]], book: Book) -> Iterator[Row]:
    """Engines' own times, of turns with and without a trace alike."""
    for side, letter, _ in _SIDES:
        for told in _TOLD_OF_ENGINES:
            for whose, index in (("kvloop", 0), ("bare", 1)):
                times = (_engine_time(book, pair[index], side, told) for pair in pairs)
                yield from _row(f"{letter}'s engine says, {told}: {whose}", False, times)
    yield from _row(
        "pull, by receipt",
        False,
        (None if ours.pull_seconds is None else ours.pull_seconds * 1e3 for ours, _ in pairs),
    )


def _engine_time(book: Book, result: TurnResult, side: str, told: str) -> float | None:
    seen = book.seen.get(result.record_id or "")
    if seen is None:
        return None
    times: EngineTimes = getattr(seen, side)
    seconds: float | None = getattr(times, f"{told}_seconds")
    return None if seconds is None else seconds * 1e3


def _bare_leg(bare: TurnResult, hop: str) -> float:
    seconds = bare.prefill_leg_seconds if hop == _PREFILL_REQUEST else bare.decode_leg_seconds
    return seconds * 1e3


def _time(span: SpanTimes | None, point: str) -> int | None:
    if span is None:
        return None
    return {_START: span.start_ns, _END: span.end_ns}.get(point) or span.events.get(point)


def _row(name: str, added: bool, values: Iterable[float | None]) -> list[Row]:
    known = [value for value in values if value is not None]
    if not known:
        return []
    low, middle, high = (percentile(known, share) for share in (0.25, 0.5, 0.75))
    return [Row(name, added, len(known), low, middle, high)]
