"""The GPU's parts, run on turns that answer at once: nothing of them is tried there first."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.gpu import checks, ways
from bench.gpu.added import added
from bench.gpu.engines import engine_pairs, rehearsal_pairs
from bench.gpu.models import kv_bytes_per_token, model_config
from bench.gpu.observed import Book
from bench.gpu.outcome import Outcome
from bench.gpu.parts import PARTS
from bench.gpu.spans import SpanSink
from bench.gpu.ways import Bench, Ways
from kvloop.bench.rounds import run_rounds
from kvloop.bench.samples import Run, Sample, Shape
from kvloop.bench.turns import TurnRequest, TurnResult
from services.worker.budget import BlockShares, BlockUse, blocks_to_free
from services.worker.kv_layout import Attention, attention_of
from services.worker.settings import WorkerSettings
from tests.unit.bench.fakes import FakeClock, FakePrefill, FakeTurns, result

REPOSITORY = Path(__file__).parents[3]


class _Turns(FakeTurns):
    """Turns during which others get to run."""

    async def run(self, request: TurnRequest) -> TurnResult:
        await asyncio.sleep(0)
        return await super().run(request)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Every pair of engines is there."""
    monkeypatch.setattr(ways, "HttpPrefillEngine", lambda url: FakePrefill())
    usage = iter([0.5] + [0.0] * 1000)
    monkeypatch.setattr(checks, "_kv_usage", lambda url: next(usage))
    clock = FakeClock()
    turns = _Turns(clock=clock)
    monkeypatch.setattr(checks, "list_pins", lambda kvmeta: [])
    every_way = Ways(
        turns,
        "http://p",
        "http://d",
        bare=turns,
        gateway=turns,
        split=turns,
        decode_alone=turns,
        lease_seconds=0.0,
    )
    return Bench(
        ways={name: dataclasses.replace(every_way) for name in engine_pairs()},
        clock=clock,
        wall_clock=lambda: round(clock() * 1e9),
        stop=lambda: False,
        on_progress=lambda progress: None,
        source=random.Random(1),
        scale=64,
    )


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between rounds are for engines."""

    async def at_once(*arguments: object, **more: object) -> Run:
        return await run_rounds(*arguments, **more, sleep=FakeClock().sleep)  # type: ignore[arg-type]

    monkeypatch.setattr(ways, "run_rounds", at_once)


@pytest.mark.parametrize("name", PARTS)
async def test_every_part_runs_to_its_end(bench: Bench, name: str) -> None:
    found = Outcome()
    await PARTS[name].run(bench, found)
    await found.finish()
    assert found.runs
    assert not [s.error for run in found.runs.values() for s in run.samples if s.error]
    json.dumps(found.records())
    assert not found.remarks
    assert (name in ("q8", "short", "q8-stock", "two-gpus")) == bool(found.notes)


def test_every_part_has_engines_a_row_in_the_readme_and_a_call() -> None:
    known = engine_pairs()
    readme = (REPOSITORY / "bench/gpu/README.md").read_text()
    calls = " ".join(re.findall(r"`go\.sh OUT \d+ ([a-z0-9 -]+)`", readme)).split()
    for name, part in PARTS.items():
        assert set(part.engines) <= set(known)
        assert f"| `{name}` |" in readme
        assert name in calls


@pytest.mark.parametrize("pair", engine_pairs().values(), ids=lambda pair: pair.name)
def test_every_pair_makes_a_stack(pair, tmp_path: Path) -> None:
    settings = pair.stack_settings(tmp_path)
    assert [worker.role for worker in settings.workers] == ["prefill", "decode"]
    assert Path(pair.model).name in (REPOSITORY / "bench/gpu/setup.sh").read_text()


def test_a_rehearsal_knows_the_same_engines_but_those_of_the_bare_protocol() -> None:
    assert set(engine_pairs()) - set(rehearsal_pairs("tiny")) == {"q8-bare", "q8-stock"}


async def test_without_bare_engines_kvloop_is_beside_the_bare_protocol_on_its_own(
    bench: Bench,
) -> None:
    known = {name: made for name, made in bench.ways.items() if name != "q8-bare"}
    found = Outcome()
    rehearsal = dataclasses.replace(bench, ways=known, most_repetitions=2)
    await PARTS["q8"].run(rehearsal, found)
    await found.finish()
    assert found.notes[0] == (
        "no q8-bare: nothing tells what kvloop adds to engines without its code"
    )
    assert len(found.notes) == 1 + 3 * 2  # on, over HTTP
    assert all("kvloop's services alone add" in note for note in found.notes[1:])
    assert _ways(found, "q8-8192") == {"on", "off", "http-on", "own-on"}


def _ways(found: Outcome, run: str) -> set[str]:
    return {sample.variant for sample in found.runs[run].samples}


async def test_q8_has_the_bare_protocol_on_bare_engines_and_on_kvloops(bench: Bench) -> None:
    found = Outcome()
    await PARTS["q8"].run(bench, found)
    reusing = {"on", "off", "http-on", "own-on", "bare-on"}
    assert _ways(found, "q8-8192") == {*reusing, "bare-off"}
    assert _ways(found, "q8-16384") == _ways(found, "q8-32768") == reusing
    told = " ".join(found.notes)
    assert "kvloop with all it makes of its engines adds" in told
    assert "on engines without any code of kvloop, with reuse on, over HTTP" in told
    assert "on kvloop's own engines, with reuse on: " in told


@pytest.mark.parametrize(
    ("part", "run", "untraced"),
    [("q8", "q8-8192", 12), ("q8", "q8-16384", 6), ("q8", "q8-32768", 6)],
)
async def test_enough_turns_are_not_traced(
    bench: Bench, part: str, run: str, untraced: int
) -> None:
    found = Outcome(book=Book(SpanSink()))
    await PARTS[part].run(bench, found)
    last = [s.result for s in found.runs[run].samples if (s.variant, s.turn) == ("on", 2)]
    kept = [taken for taken in last if taken and taken.record_id not in found.book.traced]
    assert len(kept) == untraced


async def test_short_leaves_16k_out(bench: Bench) -> None:
    found = Outcome()
    await PARTS["short"].run(bench, found)
    assert list(found.runs) == ["q8-8192", "q8-32768"]


async def test_two_gpus_take_the_first_turn_once_and_the_second_cold(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, turns = FakePrefill(), _Turns()
    monkeypatch.setattr(ways, "HttpPrefillEngine", lambda url: prefill)
    on = Ways(turns, "http://p", "http://d", bare=turns, gateway=turns)
    await PARTS["two-gpus"].run(dataclasses.replace(bench, ways={"q32-two-gpus": on}), Outcome())
    measured = [request for request in turns.requests if request.cache_salt]
    last = [request for request in measured if request.last]
    assert prefill.resets == len(last) == (6 + 1 + 5 + 1) * 4 + 4 * 2
    salts = {request.cache_salt for request in measured}
    assert len(salts) == 6 + 1 + 5 + 1 + 4
    assert len({request.conversation for request in measured}) == len(last)


# What is retained at once: turns under kvloop's pins, and in all; each of so many tokens.
@pytest.mark.parametrize(
    ("name", "kind", "context", "pinned", "held"),
    [("q8", "q8", 32768, 2, 3), ("q32-two-gpus", "q32", 40960, 2, 3), ("q8", "q8", 4700, 8, 8)],
)
def test_decode_has_room_for_all_that_is_retained(
    name: str, kind: str, context: int, pinned: int, held: int
) -> None:
    pair = engine_pairs()[name]
    total = _kv_gib(pair.args) * 2**30 // (64 * kv_bytes_per_token(model_config(kind)))
    one = -(-(context + 16 + 200 + 8) // 64) + 1
    default = WorkerSettings.model_fields
    shares = BlockShares(
        retained=default["retained_blocks_share"].default,
        free=default["free_blocks_share"].default,
    )
    free = int(total) - (held + 1) * one  # and a turn that runs
    use = BlockUse(total=int(total), retained=pinned * one, free=free)
    assert blocks_to_free(use, shares) is None


def test_the_engines_of_one_call_fit_one_gpu() -> None:
    pairs = engine_pairs()
    weights_and_rest = 16.5  # GiB, Qwen3-8B in bf16 with graphs and CUDA's own
    for call in (("q8", "q8-bare"), ("q8", "q8-stock"), ("q8", "q8-tcp")):
        taken = sum(
            _kv_gib(pairs[name].args_of(role)) + weights_and_rest
            for name in call
            for role in ("prefill", "decode")
        )
        assert taken <= 135


def _kv_gib(args: Sequence[str]) -> int:
    """What vLLM takes: the last of a flag."""
    at = len(args) - list(args)[::-1].index("--kv-cache-memory-bytes")
    return int(args[at].removesuffix("G"))


@pytest.mark.parametrize(
    ("kind", "kib", "attention"),
    [
        ("q8", 144, Attention.UNIFORM),
        ("q32", 256, Attention.UNIFORM),
        ("a3b", 96, Attention.UNIFORM),
        ("v2lite", 30.375, Attention.LATENT),
    ],
)
def test_shapes_keep_as_much_kv_as_their_models(
    kind: str, kib: float, attention: Attention
) -> None:
    config = model_config(kind)
    assert kv_bytes_per_token(config) == kib * 1024
    assert attention_of(config) is attention


def test_what_kvloop_adds_is_told_from_pairs_and_by_legs() -> None:
    shape, samples = Shape(100), []
    for repetition, (ours, bare) in enumerate([(0.110, 0.100), (0.218, 0.210), (0.312, 0.300)]):
        for name, ttft in (("on", ours), ("bare-on", bare)):
            taken = dataclasses.replace(
                result(ttft=ttft, pulled=50),
                prefill_leg_seconds=bare * 0.8,
                decode_leg_seconds=bare * 0.2,
            )
            samples.append(Sample(shape, name, repetition, 0, 2, taken))
    (said,) = added(Run(tuple(samples), ()))
    assert said == (
        "kvloop with all it makes of its engines adds 10.0 ms (quartiles 9.0 to 11.0, 3 pairs) "
        "to the bare protocol's 210.0 ms on engines without any code of kvloop"
        ", with reuse on: +0.0 ms in the legs, 10.0 ms outside them"
    )


def test_turns_over_http_are_compared_by_their_whole_time() -> None:
    shape, samples = Shape(100), []
    for repetition, (ours, bare) in enumerate([(0.104, 0.100), (0.206, 0.200), (0.301, 0.300)]):
        for name, ttft in (("http-on", ours), ("own-on", bare)):
            samples.append(Sample(shape, name, repetition, 0, 2, result(ttft=ttft, pulled=50)))
    (said,) = added(Run(tuple(samples), ()))
    assert said == (
        "kvloop's services alone add 4.0 ms (quartiles 2.5 to 5.0, 3 pairs) to the bare "
        "protocol's 200.0 ms on kvloop's own engines, with reuse on, over HTTP"
    )
