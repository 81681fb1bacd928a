"""The chat template and tool calls: what is said comes back as the same tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sim.api_errors import ApiError
from services.sim.api_requests import ChatRequest
from services.sim.chat_template import render, tool_call_text
from services.sim.tokenizer import EOS_ID, Tokenizer
from services.sim.tools import ToolCallReader, demanded_function, tool_grammar

_TOKENIZER = Tokenizer()
_WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "exact": {"type": "boolean"},
        },
    },
}
_TOOLS = [
    {"type": "function", "function": {"name": "other"}},
    {"type": "function", "function": _WEATHER},
]


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_messages_become_turns() -> None:
    text = render([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}])
    assert text == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_last_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    text = render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nI am")


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in render([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "list index out of range"),
        ([{"content": "hi"}], "needs a role"),
        ([{"role": "user", "content": 5}], "must be a string"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "At most 0 image",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused(messages: list[Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        render(messages)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ("none", None),
        ("auto", None),
        ("required", "other"),
        (_named("get_weather"), "get_weather"),
    ],
)
def test_a_call_is_made_when_it_is_demanded(
    choice: str | dict[str, Any] | None, expected: str | None
) -> None:
    request = ChatRequest(messages=[], tools=_TOOLS, tool_choice=choice)
    function = demanded_function(request)
    assert (function and function["name"]) == expected


def test_a_call_of_an_unknown_function_is_refused() -> None:
    request = ChatRequest(messages=[], tools=_TOOLS, tool_choice=_named("nope"))
    with pytest.raises(ApiError, match="does not match any"):
        demanded_function(request)


def test_arguments_fit_the_schema_and_depend_on_the_kv() -> None:
    write = tool_grammar(_WEATHER, _TOKENIZER)
    texts = [_TOKENIZER.decode(write(bytes([seed] * 16))[:-1]) for seed in (1, 2)]
    assert texts[0] != texts[1]
    delta = ToolCallReader("get_weather").add(texts[0], finished=True)
    assert delta is not None
    arguments = json.loads(delta.arguments)
    assert list(arguments) == ["city", "days", "unit", "exact"]
    assert isinstance(arguments["city"], str)
    assert type(arguments["days"]) is int
    assert arguments["unit"] in ("C", "F")
    assert write(bytes(16))[-1] == EOS_ID


@given(st.integers(0, 255))
def test_a_call_repeated_in_the_history_is_the_same_tokens(seed: int) -> None:
    tokens = list(tool_grammar(_WEATHER, _TOKENIZER)(bytes([seed] * 16)))
    delta = ToolCallReader("get_weather").add(_TOKENIZER.decode(tokens), finished=True)
    assert delta is not None
    call = {"function": {"name": "get_weather", "arguments": delta.arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    history = _TOKENIZER.encode(render([message], add_generation_prompt=False))
    start = len(_TOKENIZER.encode("<|im_start|>assistant\n"))
    assert history[start : start + len(tokens)] == tokens


@given(st.lists(st.integers(1, 7), max_size=40))
def test_a_call_taken_apart_in_pieces_gives_the_same_arguments(sizes: list[int]) -> None:
    text = tool_call_text("f", '{"a": {"b": "}\\n"}}')
    reader = ToolCallReader("f")
    names, arguments, start = [], "", 0
    for size in [*sizes, len(text)]:
        piece = text[start : start + size]
        start += size
        delta = reader.add(piece, finished=start >= len(text))
        if delta is not None:
            names.append(delta.name)
            arguments += delta.arguments
        if start >= len(text):
            break
    assert arguments == '{"a": {"b": "}\\n"}}'
    assert [name for name in names if name is not None] == ["f"]
    assert names[0] == "f"
