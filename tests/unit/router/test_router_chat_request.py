"""A ChatRequest becomes an OpenAI body, or an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvloop.errors import InvalidFieldError
from kvloop.router.v1 import router_pb2
from services.router.request import chat_turn

Message = router_pb2.ChatMessage
Call = router_pb2.ToolCall
USER = Message(role="user", content="hello")


def chat(**fields) -> router_pb2.ChatRequest:
    return router_pb2.ChatRequest(**({"model": "m", "messages": [USER]} | fields))


def body(**fields) -> Any:
    return json.loads(chat_turn(chat(**fields)).body_json)


def fault(**fields) -> str:
    with pytest.raises(InvalidFieldError) as caught:
        chat_turn(chat(**fields))
    return caught.value.field


def test_smallest_request() -> None:
    assert chat_turn(chat()).body_json == (
        b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
    )


def test_absent_and_empty_content_differ() -> None:
    calls = [Call(id="1", name="f", arguments_json="{}")]
    messages = [
        Message(role="assistant", tool_calls=calls),
        Message(role="assistant", content="", tool_calls=calls),
    ]
    built = body(messages=messages)["messages"]
    assert [message["content"] for message in built] == [None, ""]


def test_every_message_field_is_written() -> None:
    messages = [
        Message(role="system", content="s", name="n"),
        Message(
            role="assistant",
            content="a",
            reasoning_content="because",
            tool_calls=[Call(id="1", name="f", arguments_json='{"x": 1.0')],
            extra_json=b'{"refusal":null}',
        ),
        Message(role="tool", content="t", tool_call_id="1"),
    ]
    assert body(messages=messages)["messages"] == [
        {"role": "system", "content": "s", "name": "n"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "because",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x": 1.0'},
                }
            ],
            "refusal": None,
        },
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]


def test_tools_and_choice_are_written() -> None:
    tool = router_pb2.Tool(name="f", description="d", parameters_json=b'{"b":1,"a":2}', strict=True)
    built = chat_turn(chat(tools=[tool], tool_choice_json=b'"auto"')).body_json
    assert (
        b'"tools":[{"type":"function","function":{"name":"f","description":"d",'
        b'"parameters":{"b":1,"a":2},"strict":true}}],"tool_choice":"auto"' in built
    )


def test_sampling_takes_openai_names_and_leaves_the_rest_to_the_engine() -> None:
    sampling = router_pb2.SamplingParams(
        max_tokens=5, temperature=0.0, top_k=-1, seed=-(2**40), stop=["a", "b"], stop_token_ids=[7]
    )
    built = body(sampling=sampling)
    del built["model"], built["messages"]
    assert built == {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_k": -1,
        "seed": -(2**40),
        "stop": ["a", "b"],
        "stop_token_ids": [7],
    }


def test_unicode_survives() -> None:
    text = 'naïve "👍" \\ \u2028 \x00 漢字'
    assert body(messages=[Message(role="user", content=text)])["messages"][0]["content"] == text


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([USER, Message(content="x")], "messages[1].role"),
        ([Message(role="User", content="x")], "messages[0].role"),
        ([Message(role="user")], "messages[0].content"),
        ([Message(role="tool", tool_call_id="1")], "messages[0].content"),
        ([Message(role="assistant")], "messages[0].content"),
        ([Message(role="tool", content="x")], "messages[0].tool_call_id"),
        ([Message(role="user", content="x", tool_call_id="1")], "messages[0].tool_call_id"),
        (
            [Message(role="user", content="x", tool_calls=[Call(id="1", name="f")])],
            "messages[0].tool_calls",
        ),
        (
            [Message(role="user", content="x", reasoning_content="r")],
            "messages[0].reasoning_content",
        ),
        (
            [Message(role="assistant", tool_calls=[Call(name="f")])],
            "messages[0].tool_calls[0].id",
        ),
        (
            [Message(role="assistant", tool_calls=[Call(id="1"), Call(id="2")])],
            "messages[0].tool_calls[0].name",
        ),
        (
            [Message(role="user", content="x", content_parts_json=b'[{"type":"text"}]')],
            "messages[0].content_parts_json",
        ),
        ([Message(role="user", content_parts_json=b"[]")], "messages[0].content_parts_json"),
        ([Message(role="user", content_parts_json=b"{}")], "messages[0].content_parts_json"),
        (
            [Message(role="user", content_parts_json=b'[{"type":"text"},{"type":1}]')],
            "messages[0].content_parts_json[1].type",
        ),
        ([Message(role="user", content_parts_json=b'["x"]')], "messages[0].content_parts_json[0]"),
        ([Message(role="user", content="x", extra_json=b"3")], "messages[0].extra_json"),
        (
            [Message(role="user", content="x", extra_json=b'{"content":"y"}')],
            "messages[0].extra_json.content",
        ),
        (
            [Message(role="user", content="x", extra_json=b'{"role":"system"}')],
            "messages[0].extra_json.role",
        ),
    ],
)
def test_bad_message_is_named(messages, field) -> None:
    assert fault(messages=messages) == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": ""}, "model"),
        ({"model": "x" * 257}, "model"),
        ({"conversation_id": "x" * 257}, "conversation_id"),
        ({"conversation_id": "a\0b"}, "conversation_id"),
        ({"tools": [router_pb2.Tool()]}, "tools[0].name"),
        ({"tools": [router_pb2.Tool(name="f", parameters_json=b"[]")]}, "tools[0].parameters_json"),
        ({"tool_choice_json": b'"sometimes"'}, "tool_choice_json"),
        ({"tool_choice_json": b'{"function":{}}'}, "tool_choice_json"),
        ({"tool_choice_json": b"auto"}, "tool_choice_json"),
        ({"tool_choice_json": b'"\xff"'}, "tool_choice_json"),
    ],
)
def test_bad_field_is_named(fields, field) -> None:
    assert fault(**fields) == field


def test_a_conversation_id_of_256_characters_passes() -> None:
    assert chat_turn(chat(conversation_id="ü" * 256)).conversation_id == "ü" * 256


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": float("inf")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ],
)
def test_sampling_out_of_bounds_is_named(sampling, field) -> None:
    assert fault(sampling=router_pb2.SamplingParams(**sampling)) == f"sampling.{field}"


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1},
        {"top_k": 0},
        {"min_p": 0},
        {"stop": ["x"] * 16},
        {"ignore_eos": False},
        {"seed": 2**63 - 1},
    ],
)
def test_sampling_at_its_bounds_passes(sampling) -> None:
    chat_turn(chat(sampling=router_pb2.SamplingParams(**sampling)))
