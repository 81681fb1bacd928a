"""What names a conversation that has no id."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.history_digest import answer, conversation_id, extend
from services.router.history import History, read_history

USER = {"role": "user", "content": "hi"}


def _read(*messages: Any, cache_salt: str | None = None) -> History:
    found = read_history(msgspec.Raw(json.dumps(messages).encode()), cache_salt)
    assert found is not None
    return found


def _same(*variants: Any) -> bool:
    return len({_read(USER, variant).digest for variant in variants}) == 1


def test_the_next_turn_finds_what_this_one_was_committed_under() -> None:
    """A10, DESIGN: the router's digest of the next request is the worker's of this one."""
    first = _read(USER)
    committed = conversation_id(extend(first.digest, answer("hello")))
    following = _read(USER, {"role": "assistant", "content": "hello"}, USER)
    assert first.conversation_id == ""
    assert following.conversation_id == committed
    assert (first.answers, following.answers) == (0, 1)


@pytest.mark.parametrize(
    "returned",
    [
        {"role": "assistant", "content": "hello"},
        {"role": "assistant", "content": " hello\n"},
        {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "hello", "refusal": None, "annotations": []},
        {"role": "assistant", "content": "hello", "tool_calls": None},
        {"role": "assistant", "content": "hello", "tool_calls": []},
        {"role": "assistant", "content": "hello", "reasoning_content": "hmm", "reasoning": "hmm"},
        {"role": "assistant", "content": "<think>hmm</think>\n\nhello"},
    ],
)
def test_what_clients_are_known_to_do_to_an_answer_changes_nothing(returned: Any) -> None:
    """A6: the history comes back with the reasoning stripped, or as the SDK dumps it."""
    said = conversation_id(extend(_read(USER).digest, answer("hmm</think>hello")))
    assert _read(USER, returned, USER).conversation_id == said


def test_calls_are_compared_by_name_and_arguments() -> None:
    def calls(*named: tuple[str, str], content: str | None = None) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {"id": f"{i}", "type": "function", "function": {"name": n, "arguments": a}}
                for i, (n, a) in enumerate(named)
            ],
        }

    assert _same(calls(("f", '{"a": 1}')), calls(("f", '{"a":1}'), content=""))
    assert _same(calls(("f", "")), calls(("f", "{}")))
    assert not _same(calls(("f", '{"a":1}')), calls(("f", '{"a":2}')))
    assert not _same(calls(("f", "{}")), calls(("g", "{}")))
    assert not _same(calls(("f", "not json")), calls(("f", "not json either")))


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "HELLO"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello", "name": "x"},
        {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "tool", "content": "hello", "tool_call_id": "1"},
    ],
)
def test_other_messages_are_other_histories(other: Any) -> None:
    assert not _same({"role": "assistant", "content": "hello"}, other)


def test_an_edit_anywhere_is_another_history() -> None:
    """A7: compaction, edits and truncation."""
    first, second = ({"role": "assistant", "content": text} for text in ("a", "b"))
    said = [USER, first, USER, second]
    edited = [{"role": "user", "content": "ho"}, *said[1:]]
    ids = {_read(*history).conversation_id for history in (said, said[2:], said[:2], edited)}
    assert len(ids) == 4


def test_messages_are_not_run_together() -> None:
    assert _read({"role": "user", "content": "ab"}).digest != (
        _read({"role": "user", "content": "a"}, {"role": "user", "content": "b"}).digest
    )


def test_salts_keep_equal_histories_apart() -> None:
    """A11: what is said under one salt is not looked up under another."""
    said = (USER, {"role": "assistant", "content": "a"})
    ids = {_read(*said, cache_salt=salt).conversation_id for salt in (None, "", "a", "b")}
    assert len(ids) == 4


@pytest.mark.parametrize("messages", [b"[1]", b'[{"role":1}]', b'"x"', b'[{"role":"user"', b"{}"])
def test_what_is_not_well_formed_has_no_history(messages: bytes) -> None:
    assert read_history(msgspec.Raw(messages), None) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool"]), "content": JSON},
            optional={"name": st.text(max_size=3), "x": JSON},
        ),
        max_size=4,
    )
)
def test_any_content_has_a_history_that_only_grows(messages: list[dict[str, Any]]) -> None:
    whole = _read(*messages)
    roles = "".join(message["role"][0] for message in messages)
    assert whole.answers == len([run for run in roles.replace("u", "t").split("t") if run])
    assert _read(*messages).digest == whole.digest
    assert _read(*messages, USER).digest != whole.digest
