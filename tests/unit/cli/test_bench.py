"""`kvloop bench ttft` against a router that pretends to reuse."""

from __future__ import annotations

import csv
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvloop.errors import UnavailableError
from kvloop.router.v1 import router_pb2
from tests.unit.client.fake_router import FakeRouter, turn_result

Run = Callable[..., int]
SMALL = ("--context", "30", "--answer", "4", "--message", "5", "--turns", "2", "--repetitions", "2")


@pytest.fixture
def serving(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> FakeRouter:
    """A router that serves one model and pulls in second turns with reuse; no kvmeta."""
    monkeypatch.setenv("KVLOOP_KVMETA", "127.0.0.1:9")
    router.models = [router_pb2.Model(name="tiny", prefill_workers=1, decode_workers=1)]

    answer = router._turn

    async def turn(request: router_pb2.GenerateRequest, response: Any) -> AsyncIterator[Any]:
        count, tokens = request.sampling.max_tokens, len(request.token_ids.ids)
        router.chunks = [
            {"choices": [{"index": 0, "text": "x", "token_ids": [7 + index]}]}
            for index in range(count)
        ]
        pulled = tokens - 5 if tokens > 30 and not request.disable_reuse else 0
        router.result = turn_result(pulled=pulled, recomputed=tokens - pulled, miss=None)
        async for event in answer(request, response):
            yield event

    monkeypatch.setattr(router, "_turn", turn)
    return router


def test_a_table_and_the_comparison_of_answers_are_printed(
    serving: FakeRouter, kvloop: Run, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert kvloop("bench", "ttft", *SMALL) == 0
    printed = capsys.readouterr().out
    assert "TTFT p50" in printed
    assert "on: 2 of 2 answers equal those recomputed" in printed
    assert "control: 2 of 2 answers equal those recomputed" in printed


def test_reuse_is_asked_for_in_one_way_alone(serving: FakeRouter, kvloop: Run) -> None:
    assert kvloop("bench", "ttft", *SMALL, "--warm-ups", "0") == 0
    turns = [r for r in serving.requests if isinstance(r, router_pb2.GenerateRequest)]
    assert len(turns) == 2 * 2 * 3
    for request in turns:
        assert request.disable_reuse == (not request.conversation_id.endswith("-on"))
        extra = json.loads(request.extra_body_json)
        assert extra == {"cache_salt": request.conversation_id, "return_token_ids": True}
        assert (request.sampling.ignore_eos, request.sampling.temperature) == (True, 0.0)
    ended = [r for r in serving.requests if isinstance(r, router_pb2.EndConversationRequest)]
    assert {r.conversation_id for r in ended} == {r.conversation_id for r in turns}


def test_files_and_charts_are_written(serving: FakeRouter, kvloop: Run, tmp_path: Path) -> None:
    out = tmp_path / "results"
    assert kvloop("bench", "ttft", *SMALL, "--no-control", "--seed", "5", "--out", str(out)) == 0
    document = json.loads((out / "ttft.json").read_text())
    assert document["conditions"]["seed"] == 5
    assert len(document["samples"]) == 2 * 2 * 2
    with (out / "ttft.csv").open(newline="") as file:
        last = [row for row in csv.DictReader(file) if row["turn"] == "2"]
    assert {row["variant"]: row["pulled_tokens"] for row in last} == {"off": "0", "on": "34"}
    assert (out / "ttft-by-context.svg").exists()
    assert not (out / "prefill-split.svg").exists()


def test_failed_turns_fail_the_command(serving: FakeRouter, kvloop: Run, capsys) -> None:
    serving.error = UnavailableError("it is away")
    assert kvloop("bench", "ttft", *SMALL) == 1
    assert "it is away" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cold"], "--prefill-engine-url"),
        (["--charts", "gif"], "svg"),
        (["--context", "many"], "many"),
        (["--context", "0"], "at least"),
        (["--rate", "1", "--concurrency", "2"], "not both"),
        (["--rate", "1", "--concurrency", "1,2"], "1,2"),
        (["--trace", "/nowhere/trace.jsonl"], "No such file"),
    ],
)
def test_wrong_usage_is_refused(
    serving: FakeRouter, kvloop: Run, capsys, arguments: list[str], said: str
) -> None:
    assert kvloop("bench", "ttft", *arguments) == 2
    assert said in capsys.readouterr().err
    assert not serving.requests


def test_conversations_come_at_a_rate(serving: FakeRouter, kvloop: Run, capsys) -> None:
    arguments = ["--rate", "200", "--conversations", "4", "--warm-ups", "0", "--no-control"]
    assert kvloop("bench", "ttft", *SMALL[:8], *arguments) == 0
    turns = [r for r in serving.requests if isinstance(r, router_pb2.GenerateRequest)]
    assert len(turns) == 4 * 2 * 2
    assert "on: 4 of 4 answers equal those recomputed" in capsys.readouterr().out


def test_a_trace_is_held_and_its_files_written(
    serving: FakeRouter, kvloop: Run, tmp_path: Path
) -> None:
    trace, out = tmp_path / "own.jsonl", tmp_path / "results"
    turn = {"message_tokens": 40, "answer_tokens": 4}
    trace.write_text(
        "\n".join(json.dumps({"start_seconds": at, "turns": [turn, turn]}) for at in (0, 0.01, 9))
    )
    arguments = ["--conversations", "2", "--warm-ups", "1", "--out", str(out)]
    assert kvloop("bench", "ttft", "--trace", str(trace), *arguments) == 0
    document = json.loads((out / "ttft.json").read_text())
    assert document["conditions"]["arrivals"] == "as recorded"
    assert len(document["samples"]) == 2 * 2 * 3
    with (out / "ttft.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["context_up_to"] for row in rows if row["turn"] == "0"} == {"", "1024"}


def test_a_trace_without_times_asks_how_it_shall_come(
    serving: FakeRouter, kvloop: Run, tmp_path: Path, capsys
) -> None:
    trace = tmp_path / "own.jsonl"
    trace.write_text('{"turns": [{"message_tokens": 4, "answer_tokens": 4}]}')
    assert kvloop("bench", "ttft", "--trace", str(trace)) == 2
    assert "at which rate" in capsys.readouterr().err
    assert not serving.requests
    assert kvloop("bench", "ttft", "--trace", str(trace), "--concurrency", "1") == 0


def test_what_is_wrong_with_a_trace_is_told(
    serving: FakeRouter, kvloop: Run, tmp_path: Path, capsys
) -> None:
    trace = tmp_path / "own.jsonl"
    trace.write_text('{"turns": []}')
    assert kvloop("bench", "ttft", "--trace", str(trace)) == 2
    assert "line 1" in capsys.readouterr().err
    assert not serving.requests


def test_other_requests_run_meanwhile(serving: FakeRouter, kvloop: Run, capsys) -> None:
    assert kvloop("bench", "ttft", *SMALL, "--traffic", "1") == 0
    turns = [r for r in serving.requests if isinstance(r, router_pb2.GenerateRequest)]
    assert any("others" in request.conversation_id for request in turns)
    assert "without retained blocks and bytes" in capsys.readouterr().out


def test_an_engine_that_cannot_be_asked_is_told(serving: FakeRouter, kvloop: Run, capsys) -> None:
    arguments = ["--prefill-engine-url", "http://127.0.0.1:9", "--cold"]
    assert kvloop("bench", "ttft", *SMALL, *arguments) == 3
    assert "cannot be reached" in capsys.readouterr().err
