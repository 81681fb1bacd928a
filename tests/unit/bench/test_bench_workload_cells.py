"""Samples of a workload reduced by turn and by length; what other requests felt."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloop.bench.cells import LATER_TURNS, Cell, CellKey, cells, gain
from kvloop.bench.charts import write_charts
from kvloop.bench.files import cell_record
from kvloop.bench.samples import KvBlocks, RoundSample, Run, Sample, Shape, Workload
from kvloop.bench.slowdown import Slowdown, slowdown
from kvloop.bench.tables import slowdown_lines, ttft_table
from kvloop.bench.traffic import Traffic
from kvloop.bench.turns import TurnResult
from tests.unit.bench.fakes import result

LOAD = Workload("trace.jsonl", "2 per second", 2, 3)


def _turn(ttft: float, prompt: int, pulled: int = 0) -> TurnResult:
    seconds = 0.01 if pulled else None
    return result(ttft=ttft, prompt=prompt, pulled=pulled, pull_seconds=seconds)


def _run() -> Run:
    samples = []
    for variant, speed in (("off", 1.0), ("on", 0.25)):
        for conversation, start in enumerate((900, 3000)):
            for turn in (1, 2, 3):
                prompt = start + 500 * turn
                reuses = variant == "on" and turn > 1
                taken = _turn(0.001 * prompt * (speed if turn > 1 else 1), prompt, 1000 * reuses)
                samples.append(Sample(LOAD, variant, 0, conversation, turn, taken))
    rounds = [RoundSample(LOAD, name, 0, 0, 10.0, 4.0, None, 77) for name in ("off", "on")]
    return Run(tuple(samples), tuple(rounds), KvBlocks(16, 1_000_000, 500))


def _cell(found: list[Cell], turn: int, context: int | None, variant: str) -> Cell:
    return next(c for c in found if c.key == CellKey(LOAD, turn, context, variant))


def test_there_is_a_cell_for_each_turn_for_all_later_ones_and_for_their_lengths() -> None:
    keys = [(c.turn, c.key.context) for c in cells(_run()) if c.variant == "on"]
    assert keys == [(1, None), (2, None), (3, None), (0, None), (0, 2048), (0, 4096), (0, 8192)]


def test_turns_gather_by_the_length_of_their_prompts() -> None:
    found = cells(_run())
    # 1900 tokens; then 2400 and 4000; then 4500.
    short, middle = (_cell(found, LATER_TURNS, bound, "on") for bound in (2048, 4096))
    assert short.ttft is not None
    assert short.ttft.count == 1
    assert middle.ttft is not None
    assert middle.ttft.count == 2
    assert gain(found, middle) == pytest.approx(4.0)
    assert gain(found, _cell(found, 1, None, "on")) == 1.0


def test_a_workloads_throughput_counts_all_its_turns() -> None:
    found = cells(_run())
    later = _cell(found, LATER_TURNS, None, "on")
    assert later.tokens_per_second == pytest.approx(3 * 6 / 4.0)
    assert later.retained_blocks == 77
    assert _cell(found, 2, None, "on").tokens_per_second is None


def test_bytes_and_bandwidth_come_from_receipts_without_the_engines_count() -> None:
    later = _cell(cells(_run()), LATER_TURNS, None, "on")
    assert later.pulled_bytes == 4 * 63 * 1_000_000
    assert later.transfer_seconds == pytest.approx(0.01)
    assert later.bytes_per_second == pytest.approx(63e6 / 0.01)
    off = _cell(cells(_run()), LATER_TURNS, None, "off")
    assert (off.pulled_bytes, off.bytes_per_second, off.transfer_seconds) == (None, None, None)


def test_the_table_and_the_records_show_every_cell() -> None:
    found = cells(_run())
    table = ttft_table(found)
    assert table.row_count == len(found) == 14
    turns = list(table.columns[2].cells)
    assert turns[:8] == ["1", "1", "2", "2", "3", "3", "2+", "2+"]
    assert turns[8] == "2+, to 2,048"
    assert set(table.columns[1].cells) == {"2 per second"}
    records = [cell_record(cell, found) for cell in found]
    assert len({tuple(record) for record in records}) == 1
    assert records[-1]["context_up_to"] == 8192
    assert records[0]["name"] == "trace.jsonl"


def test_charts_are_drawn_by_length_by_turn_and_split(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_charts(tmp_path, cells(_run()))
    assert [path.name for path in written] == [
        "ttft-by-context.svg",
        "ttft-by-turn.svg",
        "prefill-split.svg",
    ]


def _seen() -> Traffic:
    """Chunks at 11.0 and then at 11.1, 11.3 and 11.7."""
    return Traffic(answers=[(10.0, result(ttft=1.0, gaps=(0.1, 0.2, 0.4)))], failures=2)


def _rounds(turn: int = 2) -> Run:
    shape = Shape(100)
    samples = [
        Sample(shape, name, 0, 0, turn, result(ttft=ttft))
        for name, ttft in (("off", 0.25), ("on", 0.25))
    ]
    rounds = [
        RoundSample(shape, name, 0, turn, at, seconds, None)
        for name, at, seconds in (("off", 10.95, 0.9), ("on", 11.25, 0.9))
    ]
    return Run(tuple(samples), tuple(rounds))


def test_others_are_compared_over_whole_rounds() -> None:
    felt = slowdown(_seen(), _rounds())
    assert felt.off is not None
    assert felt.on is not None
    assert (felt.off.count, felt.on.count) == (3, 2)
    assert felt.share == pytest.approx(0.3 / (0.7 / 3) - 1)
    assert (felt.answers, felt.failures) == (1, 2)


def test_others_are_compared_over_prefill_legs_alone() -> None:
    # Each leg takes 0.2 s: off sees the chunk at 11.1, on the one at 11.3.
    felt = slowdown(_seen(), _rounds(), prefill_legs_only=True)
    assert felt.off is not None
    assert felt.on is not None
    assert (felt.off.p50, felt.on.p50) == (0.1, 0.2)
    assert felt.share == pytest.approx(1.0)
    assert slowdown_lines(felt)[-2:] == [
        "decode is 100.0% slower with reuse on",
        "2 of the other requests failed",
    ]
    assert felt.record()["slower_by"] == pytest.approx(1.0)


def test_first_turns_tell_nothing_of_reuse() -> None:
    felt = slowdown(_seen(), _rounds(turn=1))
    assert felt == Slowdown(None, None, 1, 2)
    assert felt.share is None
