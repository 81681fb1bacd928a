"""What names a conversation of responses, and what names a growing prompt."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.common.history_digest import conversation_id, extend_all
from services.router.history import History, beginning_id, read_history, read_input
from services.worker.response_events import ResponseReader

USER = {"role": "user", "content": "hi"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": None}],
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "look",
    "arguments": '{"far": true}',
    "status": "completed",
}
DONE = {"type": "function_call_output", "call_id": "call_1", "output": "waves"}


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def _read(given: Any, instructions: str | None = None, salt: str | None = None) -> History:
    found = read_input(_raw(given), instructions, salt)
    assert found is not None
    return found


def _committed(history: History, *pieces: Any) -> str:
    """The id under which a worker commits the answer that these events or replies are."""
    reader = ResponseReader()
    for piece in pieces:
        reader.add(json.dumps(piece).encode())
    messages = reader.messages()
    assert messages is not None
    return conversation_id(extend_all(history.digest, messages))


@pytest.mark.parametrize("output", [[SAID], [REASONING, SAID], [CALL], [REASONING, SAID, CALL]])
@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_finds_what_this_one_was_committed_under(output: Any, stream: bool) -> None:
    first = _read([USER], "be brief")
    assert (first.conversation_id, first.answers) == ("", 0)
    reply = {"id": "resp_1", "output": output}
    pieces = [
        {"type": "response.created", "response": {"output": []}},
        {"type": "response.output_text.delta", "delta": "hello"},
        {"type": "response.completed", "response": reply},
    ]
    committed = _committed(first, *(pieces if stream else [reply]))
    following = _read([USER, *output, DONE, USER], "be brief")
    assert following.conversation_id == committed
    assert following.answers == 1


@pytest.mark.parametrize(
    "returned",
    [
        SAID,
        {"role": "assistant", "content": "hello"},
        {"role": "assistant", "content": [{"type": "output_text", "text": " hello\n"}]},
        {"type": "message", "role": "assistant", "content": "<think>x</think>hello"},
    ],
)
def test_what_clients_do_to_an_answer_changes_nothing(returned: Any) -> None:
    committed = _committed(_read([USER]), {"output": [REASONING, SAID]})
    assert _read([USER, returned, USER]).conversation_id == committed


def test_text_is_one_message_of_the_user() -> None:
    assert _read("hi").digest == _read([USER]).digest


def test_a_chat_that_goes_on_as_responses_keeps_its_name() -> None:
    messages = [{"role": "system", "content": "be brief"}, USER, {**SAID, "content": "hello"}, USER]
    chat = read_history(_raw(messages), None)
    assert chat == _read([USER, SAID, USER], "be brief")


@pytest.mark.parametrize(
    "other",
    [
        [{**USER, "content": "ho"}, SAID],
        [USER, {**SAID, "role": "user"}],
        [USER, CALL],
        [USER, {**CALL, "arguments": '{"far": false}'}],
        [USER, {"type": "custom_tool_call", "name": "look", "input": "far"}],
        [USER, SAID, DONE],
        [USER, {"type": "web_search_call", "status": "completed"}, SAID],
    ],
)
def test_other_items_are_other_histories(other: Any) -> None:
    assert _read(other).digest != _read([USER, SAID]).digest


def test_instructions_and_salts_keep_equal_inputs_apart() -> None:
    named = [(None, None), ("a", None), ("b", None), (None, "a"), (None, "b")]
    assert len({_read([USER, SAID], *named_by).conversation_id for named_by in named}) == 5


@pytest.mark.parametrize("given", [[7], [{"content": 1, "role": 2}], {}, None, [[USER]]])
def test_what_is_not_well_formed_has_no_history(given: Any) -> None:
    assert read_input(_raw(given), None, None) is None


def test_an_answer_that_cannot_be_read_has_no_messages() -> None:
    reader = ResponseReader()
    reader.add(b'{"output":7}')
    assert reader.messages() is None


def test_a_prompt_that_grows_keeps_its_id_until_it_has_doubled() -> None:
    text = "".join(chr(97 + i * i % 26) for i in range(4096))
    ids = [beginning_id(text[:length], None) for length in (1024, 1500, 2047, 2048, 4095, 4096)]
    assert ids[0] == ids[1] == ids[2]
    assert ids[3] == ids[4]
    assert len(set(ids)) == 3
    assert all(found.startswith("b:") and len(found) <= 256 for found in ids)


def test_tokens_have_beginnings_of_their_own() -> None:
    tokens = list(range(300))
    assert beginning_id(tokens, None) == beginning_id([*tokens, 7, 8], None)
    assert beginning_id(tokens, None) != beginning_id([9, *tokens[1:]], None)


def test_prompts_that_part_in_their_first_half_have_two_ids() -> None:
    one, other = "a" * 1000 + "b" * 1000, "a" * 1000 + "c" * 1000
    assert beginning_id(one, None) != beginning_id(other, None)


def test_short_prompts_have_no_id() -> None:
    assert beginning_id("a" * 1023, None) == beginning_id([1] * 255, None) == ""
    assert beginning_id("", None) == beginning_id([], None) == ""


def test_salts_keep_equal_beginnings_apart() -> None:
    ids = {beginning_id("a" * 1024, salt) for salt in (None, "", "a", "b")}
    assert len(ids) == 4
