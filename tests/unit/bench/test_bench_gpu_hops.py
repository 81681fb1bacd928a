"""Where a turn's time goes: from spans and engines' own times to rows that add up."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rich.console import Console

from bench.gpu.added import Comparison, added
from bench.gpu.bare import BareTurns
from bench.gpu.engine_times import EngineSums, EngineTimes, EngineWatch
from bench.gpu.hops import breakdown, hop_table, hops, sum_of_medians
from bench.gpu.host import busy_cores, cpu_seconds
from bench.gpu.observed import CLIENT, Book, Observation, ObservedTurns
from bench.gpu.spans import SpanSink, SpanTimes, span_sink, tracing_environment
from kvloop.aio import AsyncClient
from kvloop.bench.samples import Run, Sample, Shape
from kvloop.bench.turns import KvloopTurns, TurnRequest
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from tests.flow.gateway.fleet import fleet
from tests.flow.sim.engines import MODEL, prompt
from tests.unit.bench.fakes import FakeTurns, result

MS = 1_000_000
ON = Comparison("on", "bare-on")
PAGE = """
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1.5
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 3.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 2.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 3.0
"""


def span(name: str, start: float, end: float, **events: float) -> SpanTimes:
    """A span of trace "t"; times in milliseconds."""
    at = {event: round(when * MS) for event, when in events.items()}
    return SpanTimes("t", "s", name, round(start * MS), round(end * MS), at)


def trace(trace_id: str = "t", *, ledger: bool = True) -> list[SpanTimes]:
    """A turn whose hops take 1, 2, 3, ... ms in their order."""
    at = [0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55, 66, 78, 91, 105, 120, 136, 153]
    spans = [
        span(CLIENT, at[0], at[17]),
        span("turn", at[1], 400),
        span("prefill_leg", at[6], at[11]),
        span("prefill", at[7], at[10], engine_asked=at[8], engine_answered=at[9]),
        span("decode_leg", at[12], 400, first_chunk=at[16]),
        span("decode", at[13], 390, engine_asked=at[14], engine_answered=at[15]),
    ]
    if ledger:
        spans += [span("take_handle", at[2], at[5]), span("TakeHandle", at[3], at[4])]
    return [dataclasses.replace(made, trace_id=trace_id) for made in spans]


class _Sink(SpanSink):
    """Has spans that nobody sent."""

    def __init__(self, traces: Mapping[str, list[SpanTimes]]) -> None:
        super().__init__()
        self._traces = traces

    def of(self, trace_id: str) -> list[SpanTimes]:
        return [span for span in self._traces.get(trace_id, []) if span.name != CLIENT]


def test_every_hop_is_told_and_they_add_up_to_the_time_at_the_client() -> None:
    taken = hops(trace())
    assert list(taken.values()) == [float(number) for number in range(1, 18)]
    assert list(taken)[:2] == ["client -> router", "router, before the ledger"]
    assert list(taken)[-1] == "router -> client"


def test_without_a_ledger_the_router_has_its_time() -> None:
    taken = hops(trace(ledger=False))
    assert taken["router, before prefill"] == 20
    assert "ledger" not in taken
    assert sum(taken.values()) == 153


def test_what_decode_prepares_while_prefill_works_is_no_hop() -> None:
    beside = [span("PrepareDecode", 21, 60), span("prepare_decode", 22, 92, engine_asked=23)]
    assert hops([*beside, *trace()]) == hops([*trace(), *beside]) == hops(trace())


def test_a_hop_that_had_ended_when_the_one_before_did_takes_no_time() -> None:
    at = next(one for one in trace() if one.name == "decode")
    early = dataclasses.replace(at, events={**at.events, "engine_asked": 50 * MS})
    taken = hops([one for one in trace() if one.name != "decode"] + [early])
    assert taken["D's sidecar, before the engine"] == 0
    assert taken["D's engine, HTTP and all"] == 14 + 15
    assert sum(taken.values()) == 153


def test_a_turn_that_lacks_a_leg_is_not_told() -> None:
    assert hops([span for span in trace() if span.name != "decode"]) == {}


def _run_and_book() -> tuple[Run, Book]:
    shape, samples, traces = Shape(100), [], {}
    seen = []
    for repetition in range(4):
        record_id = f"turn-{repetition}"
        traces[record_id] = trace(record_id)
        times = EngineTimes(queue_seconds=0.004, ttft_seconds=0.006)
        seen.append(Observation(record_id, repetition > 0, 0, 153 * MS, times, EngineTimes()))
        for name, ttft, prefill, decode, key in (
            ("on", 0.153, 0.1, 0.05, record_id),
            ("bare-on", 0.020, 0.007, 0.013, None),
        ):
            taken = dataclasses.replace(
                result(ttft=ttft, pulled=50),
                prefill_leg_seconds=prefill,
                decode_leg_seconds=decode,
                record_id=key,
            )
            samples.append(Sample(shape, name, repetition, 0, 2, taken))
    book = Book(_Sink(traces))
    for observation in seen:
        book.note(observation)
    return Run(tuple(samples), ()), book


def test_the_rows_of_what_is_added_come_to_the_difference_to_the_bare_turn() -> None:
    run, book = _run_and_book()
    rows = breakdown(run, ON, book)
    told = {row.name: row for row in rows}
    assert told["TTFT"].p50 == pytest.approx(153)
    assert told["added"].p50 == pytest.approx(153 - 20)
    assert told["added"].count == 3  # that many were traced
    assert sum_of_medians(rows) == pytest.approx(133)
    assert [row.p50 for row in rows if row.name == "  longer than that by"] == pytest.approx([2, 2])
    waited = told["P's engine says, queue: kvloop"]
    assert (waited.p50, waited.count) == (4.0, 4)
    around = told["P's HTTP around its ttft: kvloop"]
    assert around.p50 == pytest.approx(9 - 6)
    assert around.count == 3
    assert "P's HTTP around its ttft: bare" not in told  # its engine was not asked
    assert breakdown(run, Comparison("off", "bare-off"), book) == []


def test_the_table_shows_each_row_once_and_the_sum() -> None:
    run, book = _run_and_book()
    console = Console(file=io.StringIO(), width=160)
    console.print(hop_table({"8192 on": breakdown(run, ON, book)}))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("longer than that by") == 2
    assert "* ledger -> router" in shown
    assert "8192 on, n=3" in shown
    assert "133.00" in shown.splitlines()[-3]


def test_what_is_added_is_told_apart_for_traced_turns() -> None:
    run, book = _run_and_book()
    plain, traced = added(run, book.traced)
    assert "1 pairs" in plain
    assert "3 pairs" in traced
    assert traced.startswith("traced, ")


def test_an_engine_tells_of_one_request_between_two_looks() -> None:
    later = PAGE.replace(" 1.5", " 1.75").replace(" 3.0", " 4.0").replace(" 2.0", " 2.125")
    assert EngineSums(later).since(EngineSums(PAGE)) == EngineTimes(0.25, None, 0.125, None)
    assert EngineSums(PAGE).since(EngineSums(PAGE)) == EngineTimes()


async def test_the_first_look_at_engines_tells_of_nothing() -> None:
    watch = EngineWatch("http://p", "http://d", fetch=lambda url: PAGE)
    assert await watch.look() == (EngineTimes(), EngineTimes())


async def test_last_turns_are_noted_and_every_second_one_is_traced() -> None:
    book = Book(SpanSink())
    turns = ObservedTurns(FakeTurns(), None, book, trace_every=2, wall_clock=lambda: 5)
    for number in range(4):
        first = await turns.run(TurnRequest(f"c{number}", [11], 2, True, last=False))
        assert first.record_id is None
        last = await turns.run(TurnRequest(f"c{number}", [11, 12], 2, True, last=True))
        assert last.record_id in book.seen
    assert [seen.traced for seen in book.seen.values()] == [False, True, False, True]
    assert last.record_id is not None
    assert book.seen[last.record_id].first_chunk_ns == 5 + round(last.ttft_seconds * 1e9)


async def test_nothing_is_traced_where_nobody_takes_spans() -> None:
    book = Book()
    turns = ObservedTurns(FakeTurns(), None, book, trace_every=1, wall_clock=time.time_ns)
    await turns.run(TurnRequest("c", [11], 2, True, last=True))
    assert book.traced == set()


def test_busy_processes_are_named_by_module_and_worker(tmp_path: Path) -> None:
    for pid, words in ((7, ["python", "-m", "services.worker", "--worker-id=decode-0"]), (8, [])):
        folder = tmp_path / str(pid)
        folder.mkdir()
        fields = " ".join(["S", *["0"] * 10, "100", "50", *["0"] * 8])
        (folder / "stat").write_text(f"{pid} (a name) {fields}\n")
        (folder / "cmdline").write_bytes("\0".join(words).encode())
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "stat").write_text("9 (of a kernel that tells little) S 0\n")
    (tmp_path / "9" / "cmdline").write_bytes(b"python")
    spent = cpu_seconds(tmp_path)
    assert set(spent) == {"7 services.worker decode-0", "8 a name"}
    assert busy_cores({"8 a name": spent["8 a name"]}, spent, 3.0) == {
        "7 services.worker decode-0": pytest.approx(
            spent["7 services.worker decode-0"] / 3, abs=1e-3
        )
    }


def test_services_take_the_tracing_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in tracing_environment("http://127.0.0.1:4317").items():
        monkeypatch.setenv(name, value)
    settings = RouterSettings()
    assert settings.otlp_endpoint == "http://127.0.0.1:4317"
    assert settings.trace_sample_ratio == 0
    worker = WorkerSettings.model_fields
    assert {"otlp_endpoint", "trace_sample_ratio"} <= set(worker)


async def test_a_turn_through_a_whole_kvloop_is_told_hop_by_hop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    async with span_sink() as sink:
        book = Book(sink)
        quiet: dict[str, Any] = {"otlp_endpoint": sink.url, "trace_sample_ratio": 0.0}
        async with (
            fleet(tmp_path, kvmeta=quiet, worker=quiet, **quiet) as running,
            AsyncClient(f"127.0.0.1:{running.router.port}") as client,
            aiohttp.ClientSession() as session,
        ):
            ends = running.prefill.url, running.decode.url
            watch = EngineWatch(*ends)
            ours = KvloopTurns(client, MODEL, time.perf_counter)
            bare = BareTurns(session, *ends, MODEL, time.perf_counter)
            shape, taken = Shape(300), {}
            for name, turns, every in (("on", ours, 1), ("bare-on", bare, 0)):
                turning = ObservedTurns(
                    turns, watch, book, trace_every=every, wall_clock=time.time_ns
                )
                # So long an answer that it is worth a pull: prefill has the prompt already.
                first = await turning.run(TurnRequest(name, prompt(300), 128, True, last=False))
                history = [*prompt(300), *first.token_ids, *prompt(20, seed=1)]
                taken[name] = await turning.run(TurnRequest(name, history, 8, True, last=True))
            await book.complete(at_most_seconds=10)
        run = Run(tuple(Sample(shape, name, 0, 0, 2, taken[name]) for name in taken), ())
        rows = {row.name: row for row in breakdown(run, ON, book)}
    assert len([name for name in rows if "->" in name]) == 8
    assert rows["TTFT"].p50 == pytest.approx(taken["on"].ttft_seconds * 1e3)
    parts = [row for row in rows.values() if row.added]
    assert all(row.p50 > -1 for row in parts if row.name != "  longer than that by")
    (traced,) = book.traced
    assert traced == taken["on"].record_id
    assert sum(hops(book.spans(traced)).values()) == pytest.approx(rows["TTFT"].p50, abs=0.001)
