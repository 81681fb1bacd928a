"""`kvloop bench ttft`'s runs through a whole kvloop on simulated engines."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvloop.aio import AsyncClient
from kvloop.bench.arrivals import Arrivals
from kvloop.bench.cells import LATER_TURNS, Cell, cells
from kvloop.bench.decode_fleet import KvmetaFleet
from kvloop.bench.outputs import check_outputs
from kvloop.bench.rounds import RoundPlan, Variant, run_rounds
from kvloop.bench.samples import Run, Shape
from kvloop.bench.schedule import SchedulePlan, run_schedule
from kvloop.bench.scripts import TokenStreams
from kvloop.bench.slowdown import slowdown
from kvloop.bench.traces import read_trace
from kvloop.bench.traffic import TrafficPlan, traffic
from kvloop.bench.transfers import HttpPrefillEngine
from kvloop.bench.turns import KvloopTurns, TurnRequest
from tests.flow.gateway.fleet import fleet
from tests.flow.sim.engines import MODEL


@dataclass
class Bench:
    """What the command would make of its options."""

    turns: KvloopTurns
    like_clients: KvloopTurns
    variants: list[Variant]
    ledger: KvmetaFleet


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """Three ways through one stack."""
    async with fleet(tmp_path) as running:
        async with AsyncClient(f"127.0.0.1:{running.router.port}") as client:
            turns = KvloopTurns(client, MODEL, time.perf_counter)
            without = KvloopTurns(client, MODEL, time.perf_counter, last_ids=False)
            prefill = HttpPrefillEngine(running.prefill.url)
            variants = [
                Variant("on", turns, True, prefill),
                Variant("off", turns, False, prefill),
                Variant("control", turns, False, prefill),
            ]
            yield Bench(
                turns, without, variants, KvmetaFleet(f"127.0.0.1:{running.kvmeta.port}", MODEL)
            )


async def _held(bench: Bench, trace: Path, arrivals: Arrivals) -> Run:
    plan = SchedulePlan(trace.name, read_trace(trace), arrivals, warm_ups=1, settle_seconds=0.05)
    run = await run_schedule(
        bench.variants,
        plan,
        TokenStreams(1, 4000),
        name="run",
        source=random.Random(1),
        clock=time.perf_counter,
        fleet=bench.ledger,
    )
    return replace(run, blocks=await bench.ledger.blocks())


def _cell(run: Run, variant: str) -> Cell:
    return next(
        cell
        for cell in cells(run)
        if (cell.turn, cell.key.context, cell.variant) == (LATER_TURNS, None, variant)
    )


def _write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


async def test_a_recorded_trace_is_held_in_an_open_loop_off_and_on(
    bench: Bench, tmp_path: Path
) -> None:
    trace = _write(
        tmp_path / "mooncake.jsonl",
        {"timestamp": 0, "input_length": 1100, "output_length": 100, "hash_ids": [1, 2, 3]},
        {"timestamp": 90, "input_length": 700, "output_length": 80, "hash_ids": [1, 9]},
        {"timestamp": 200, "input_length": 1400, "output_length": 90, "hash_ids": [1, 2, 5]},
        {"timestamp": 400, "input_length": 1600, "output_length": 10, "hash_ids": [1, 2, 5, 6]},
    )
    run = await _held(bench, trace, Arrivals())
    assert not [sample.error for sample in run.samples if sample.error]
    on, off = _cell(run, "on"), _cell(run, "off")
    # Prefill is warm: the last answers, and the ends of prompts behind its last complete
    # block, are left to pull in the second and third turn.
    assert on.pulled_tokens == round(((1199 - 1088) + (1489 - 1392)) / 2)
    assert off.pulled_tokens == 0
    assert off.misses == {"REUSE_DISABLED": 2}
    checks = {check.variant: check for check in check_outputs(run)}
    assert (checks["on"].compared, checks["on"].equal) == (2, 2)
    assert (checks["control"].compared, checks["control"].equal) == (2, 2)
    assert on.retained_blocks
    assert on.pulled_bytes
    assert on.transfer_seconds is not None
    assert on.tokens_per_second


async def test_conversations_of_text_are_held_so_many_at_once(bench: Bench, tmp_path: Path) -> None:
    def talk(name: str) -> dict[str, Any]:
        said = [("human", 2000), ("gpt", 400), ("human", 80), ("gpt", 40)]
        spoken = [{"from": who, "value": "x" * length} for who, length in said]
        return {"id": name, "conversations": spoken}

    trace = tmp_path / "sharegpt.json"
    trace.write_text(json.dumps([talk(str(number)) for number in range(4)]))
    run = await _held(bench, trace, Arrivals(at_once=2))
    on = _cell(run, "on")
    assert on.ttft is not None
    assert (on.ttft.count, on.failures) == (4, 0)
    assert on.prompt_tokens == 500 + 100 + 20
    assert on.pulled_tokens >= 64
    checks = {check.variant: check for check in check_outputs(run)}
    assert (checks["on"].compared, checks["on"].equal) == (4, 4)


async def test_rounds_tell_what_is_retained_and_what_others_feel(bench: Bench) -> None:
    plan = RoundPlan([Shape(800, 80)], 2, 1, cold=False, settle_seconds=0.02)
    async with traffic(
        bench.turns,
        TrafficPlan(requests=2, prompt_tokens=50, answer_tokens=40),
        name="others",
        source=random.Random(2),
        clock=time.perf_counter,
    ) as seen:
        run = await run_rounds(
            bench.variants,
            plan,
            name="run",
            source=random.Random(1),
            clock=time.perf_counter,
            fleet=bench.ledger,
        )
    found = {(cell.turn, cell.variant): cell for cell in cells(run)}
    assert found[2, "on"].pulled_tokens >= 64
    assert found[1, "on"].retained_blocks
    assert found[2, "on"].outside_legs is not None
    felt = slowdown(seen, run)
    assert felt.failures == 0
    assert felt.off is not None
    assert felt.on is not None


async def test_last_turns_can_be_taken_without_ids_as_chat_clients_do(bench: Bench) -> None:
    turns = bench.like_clients
    first = list(range(100, 400))
    opening = await turns.run(TurnRequest("c", first, 16, reuse=True, last=False))
    assert len(opening.token_ids) == 16
    history = [*first, *opening.token_ids, 7]
    again = await turns.run(TurnRequest("c", history, 8, reuse=True, last=True))
    assert (again.token_ids, again.generated_tokens) == ((), 8)
    assert again.pulled_tokens + again.cached_tokens > 280
    assert again.total_seconds > again.ttft_seconds > 0
