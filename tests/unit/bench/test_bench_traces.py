"""Recorded traces become scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvloop.bench.scripts import Draw, TokenStreams
from kvloop.bench.traces import TraceFormat, read_trace
from kvloop.errors import InvalidFieldError


def _lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return path


def _request(at_ms: int, tokens: int, answer: int, *blocks: int) -> dict[str, Any]:
    return {
        "timestamp": at_ms,
        "input_length": tokens,
        "output_length": answer,
        "hash_ids": list(blocks),
    }


def test_kvloops_own_form_tells_sizes_pauses_and_times(tmp_path: Path) -> None:
    trace = _lines(
        tmp_path / "own.jsonl",
        {
            "conversation": "c1",
            "start_seconds": 1.5,
            "turns": [
                {"message_tokens": 100, "answer_tokens": 20},
                {"token_ids": [11, 12], "answer_tokens": 30, "pause_seconds": 2.5},
            ],
        },
        {"turns": [{"message_tokens": 7, "answer_tokens": 3}]},
    )
    first, second = read_trace(trace)
    assert (first.name, first.start_seconds) == ("c1", 1.5)
    assert [turn.message_tokens for turn in first.turns] == [100, 2]
    assert [turn.answer_tokens for turn in first.turns] == [20, 30]
    assert first.turns[1].pause_seconds == 2.5
    assert first.turns[1].message == ((11, 12),)
    assert first.largest_prompt == 122
    assert (second.name, second.start_seconds) == ("line-2", None)


def test_conversations_with_one_prefix_begin_with_the_same_tokens(tmp_path: Path) -> None:
    prefix = {"name": "system", "tokens": 50}
    turns = [{"message_tokens": 10, "answer_tokens": 1}]
    trace = _lines(
        tmp_path / "own.jsonl",
        {"conversation": "a", "prefix": prefix, "turns": turns},
        {"conversation": "b", "prefix": prefix, "turns": turns},
    )
    streams = TokenStreams(1, 4000)
    one, other = (streams.tokens(script.turns[0].message) for script in read_trace(trace))
    assert len(one) == len(other) == 60
    assert one[:50] == other[:50]
    assert one[50:] != other[50:]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"turns": []}, "line 2"),
        ({"turns": [{"answer_tokens": 1}]}, "either message_tokens or token_ids"),
        ({"turns": [{"message_tokens": 1, "token_ids": [1], "answer_tokens": 1}]}, "either"),
        ({"turns": [{"message_tokens": 0, "answer_tokens": 1}]}, "message_tokens"),
        ({"turns": [{"message_tokens": 1, "answer_tokens": 1, "think": 2}]}, "think"),
        ({"conversation": "c", "turns": [{"message_tokens": 1, "answer_tokens": 1}]}, "twice"),
    ],
)
def test_what_is_wrong_in_a_trace_is_told_with_its_line(
    tmp_path: Path, record: dict[str, Any], said: str
) -> None:
    good = {"conversation": "c", "turns": [{"message_tokens": 1, "answer_tokens": 1}]}
    trace = _lines(tmp_path / "own.jsonl", good, record)
    with pytest.raises(InvalidFieldError, match="line 2") as caught:
        read_trace(trace, TraceFormat.KVLOOP)
    assert said in caught.value.message


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidFieldError, match="no conversation"):
        read_trace(tmp_path / "empty.jsonl")


def test_mooncakes_requests_with_a_common_prompt_are_one_conversation(tmp_path: Path) -> None:
    trace = _lines(
        tmp_path / "mooncake.jsonl",
        _request(2000, 1100, 60, 1, 2, 3),
        _request(5000, 1700, 40, 1, 2, 8, 9),
        _request(3000, 600, 10, 5, 6),
        _request(9000, 1900, 5, 1, 2, 8, 10),
    )
    first, other = read_trace(trace)
    assert [turn.message_tokens for turn in first.turns] == [1100, 1700 - 1160, 1900 - 1740]
    assert [turn.answer_tokens for turn in first.turns] == [60, 40, 5]
    assert [turn.at_seconds for turn in first.turns] == [0.0, 3.0, 7.0]
    assert first.largest_prompt == 1900
    assert (first.start_seconds, other.start_seconds) == (0.0, 1.0)
    # What a next turn adds comes from the blocks that lie behind the answer.
    assert first.turns[1].message == (
        Draw("block/8", 1160 - 1024, 1536 - 1160),
        Draw("block/9", 0, 1700 - 1536),
    )


def test_mooncakes_equal_blocks_have_equal_tokens(tmp_path: Path) -> None:
    trace = _lines(
        tmp_path / "mooncake.jsonl",
        _request(0, 1500, 1, 0, 1, 2),
        _request(1, 1300, 1, 0, 3, 4),
        _request(2, 1400, 1, 0, 5, 6),
    )
    scripts = read_trace(trace)
    assert len(scripts) == 3  # the first block names none of them: requests part after it
    streams = TokenStreams(7, 4000)
    prompts = [streams.tokens(script.turns[0].message) for script in scripts]
    assert [len(prompt) for prompt in prompts] == [1500, 1300, 1400]
    assert prompts[0][:512] == prompts[1][:512] == prompts[2][:512]
    assert prompts[0][512:600] != prompts[1][512:600]


def test_a_request_too_short_for_the_last_answer_is_another_conversation(tmp_path: Path) -> None:
    trace = _lines(
        tmp_path / "mooncake.jsonl", _request(0, 600, 500, 1, 2), _request(1, 900, 5, 1, 3)
    )
    assert [len(script.turns) for script in read_trace(trace)] == [1, 1]


def test_mooncakes_lengths_must_fit_the_blocks(tmp_path: Path) -> None:
    trace = _lines(tmp_path / "m.jsonl", _request(0, 600, 5, 1, 2), _request(1, 600, 5, 1))
    with pytest.raises(InvalidFieldError, match="line 2: 600 tokens are 2 blocks"):
        read_trace(trace)


_TALK = {
    "id": "x",
    "conversations": [
        {"from": "gpt", "value": "an answer to nothing"},
        {"from": "system", "value": "s" * 40},
        {"from": "human", "value": "h" * 60},
        {"from": "gpt", "value": "g" * 30},
        {"from": "human", "value": "h" * 9},
        {"from": "gpt", "value": "g" * 8},
        {"from": "human", "value": "never answered"},
    ],
}


@pytest.mark.parametrize("as_array", [True, False])
def test_sharegpt_gives_lengths_from_text(tmp_path: Path, as_array: bool) -> None:
    trace = tmp_path / "sharegpt.json"
    trace.write_text(json.dumps([_TALK] if as_array else _TALK))
    (script,) = read_trace(trace, characters_per_token=4.0)
    assert [turn.message_tokens for turn in script.turns] == [25, 3]
    assert [turn.answer_tokens for turn in script.turns] == [8, 2]
    assert script.start_seconds is None


def test_sharegpt_without_an_answer_is_left_out(tmp_path: Path) -> None:
    trace = tmp_path / "sharegpt.json"
    trace.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hm"}]}, _TALK]))
    assert [script.name for script in read_trace(trace)] == ["2-x"]


def test_streams_give_the_same_tokens_for_any_part() -> None:
    streams = TokenStreams(3, 4000)
    whole = streams.tokens([Draw("a", 0, 100)])
    assert streams.tokens([Draw("a", 0, 40), Draw("a", 40, 60)]) == whole
    assert streams.tokens([Draw("b", 0, 100)]) != whole
    assert TokenStreams(4, 4000).tokens([Draw("a", 0, 100)]) != whole
    assert all(10 <= token < 4000 for token in whole)
