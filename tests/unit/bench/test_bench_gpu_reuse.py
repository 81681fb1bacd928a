"""Turns that should have reused and did not are told, and taken for nothing else."""

from __future__ import annotations

import json

from bench.gpu.added import added
from bench.gpu.outcome import Outcome
from bench.gpu.reuse import missed_in_file, missed_reuse
from kvloop.bench.files import sample_records
from kvloop.bench.samples import RoundSample, Run, Sample, Shape
from kvloop.bench.transfers import Transfers
from kvloop.bench.turns import TurnResult
from tests.unit.bench.fakes import result

SHAPE = Shape(100)


def _over_http(ttft: float = 0.1) -> TurnResult:
    """A turn without a receipt."""
    return result(prompt=0, ttft=ttft)


def _run(*turns: tuple[str, TurnResult], pulls: int | None = None) -> Run:
    """A repetition for each turn, which is a last one."""
    samples, rounds = [], []
    for number, (way, taken) in enumerate(turns):
        samples.append(Sample(SHAPE, way, number, 0, 1, result()))
        samples.append(Sample(SHAPE, way, number, 0, 2, taken))
        if pulls is not None:
            rounds.append(RoundSample(SHAPE, way, number, 2, 0.0, 1.0, Transfers(count=pulls)))
    return Run(tuple(samples), tuple(rounds))


def _reasons(run: Run) -> list[str]:
    """Why turns missed, the same of the run and of its file."""
    missed = missed_reuse(run)
    assert missed_in_file(json.loads(json.dumps(sample_records(run)))) == missed
    return list(missed.values())


def test_a_receipt_tells_why_nothing_was_reused() -> None:
    run = _run(("on", result(miss_reason="EVICTED")), ("on", result(pulled=50)), pulls=1)
    assert _reasons(run) == ["EVICTED"]


def test_a_receipt_of_0_tokens_is_a_miss_without_a_reason() -> None:
    assert _reasons(_run(("own-on", result()), ("on", result()))) == ["0 tokens pulled"] * 2


def test_without_a_receipt_prefills_count_of_pulls_tells() -> None:
    over_http = ("http-on", _over_http())
    assert _reasons(_run(over_http, pulls=0)) == ["its prefill engine counted no pull"]
    assert _reasons(_run(over_http, pulls=1)) == []
    assert _reasons(_run(over_http)) == []  # nobody counted


def test_a_handle_that_prefill_did_not_read_is_no_reuse() -> None:
    assert _reasons(_run(("bare-on", result(pulled=50)), pulls=0)) == [
        "its prefill engine counted no pull"
    ]


def test_ways_without_reuse_need_not() -> None:
    run = _run(
        ("off", result(miss_reason="REUSE_DISABLED")), ("bare-off", result()), ("split", result())
    )
    assert _reasons(run) == []


def test_notes_say_how_many_turns_missed_and_why() -> None:
    found = Outcome()
    evicted = ("on", result(miss_reason="EVICTED"))
    found.keep("q8-32768", _run(evicted, ("on", result(pulled=50)), ("on", result()), evicted))
    assert found.notes == [
        "q8-32768: NO REUSE in 3 of 4 turns of `on` (EVICTED: 2, 0 tokens pulled: 1): they are "
        "left out of what kvloop adds, and the medians of this way are not those of reuse"
    ]


def test_what_kvloop_adds_is_told_of_turns_that_reused_alone() -> None:
    samples = []
    for number, (reason, ttft) in enumerate([(None, 0.11), ("EVICTED", 1.3), (None, 0.13)]):
        ours = result(ttft=ttft, pulled=0 if reason else 50, miss_reason=reason)
        samples.append(Sample(SHAPE, "on", number, 0, 2, ours))
        samples.append(Sample(SHAPE, "own-on", number, 0, 2, result(ttft=0.1, pulled=50)))
    (told,) = added(Run(tuple(samples), ()))
    assert "add 20.0 ms (quartiles 15.0 to 25.0, 2 pairs)" in told
