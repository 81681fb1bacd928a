"""Python values become protobuf fields, or an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvloop import Message, ToolCall
from kvloop.errors import InvalidFieldError
from kvloop.messages import to_chat_message, to_tool
from kvloop.requests import Sampling, generate_request
from kvloop.router.v1 import router_pb2


def test_message_and_openai_dict_say_the_same() -> None:
    made = to_chat_message(
        Message(
            "assistant",
            content=None,
            tool_calls=(ToolCall("a", "f", "{}"),),
            reasoning_content="hm",
            extra={"audio": {"id": "x"}},
        ),
        "messages[0]",
    )
    same = to_chat_message(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
            "reasoning_content": "hm",
            "audio": {"id": "x"},
        },
        "messages[0]",
    )
    assert made == same
    assert made.extra_json == b'{"audio":{"id":"x"}}'


def test_absent_and_empty_content_differ() -> None:
    assert not to_chat_message({"role": "user", "content": None}, "m").HasField("content")
    assert to_chat_message({"role": "user", "content": ""}, "m").HasField("content")


def test_content_parts_travel_as_json() -> None:
    parts = [{"type": "text", "text": "é"}]
    made = to_chat_message({"role": "user", "content": parts}, "m")
    assert made.content_parts_json == '[{"type":"text","text":"é"}]'.encode()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": 1}, "messages[3].role"),
        ({"role": "user", "content": 5}, "messages[3].content"),
        ({"role": "user", "content": [object()]}, "messages[3].content"),
        ({"role": "tool", "tool_call_id": 7}, "messages[3].tool_call_id"),
        ({"role": "assistant", "tool_calls": {}}, "messages[3].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"type": "x"}]}, "messages[3].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": 1}}]},
            "messages[3].tool_calls[0].function.name",
        ),
        ("hello", "messages[3]"),
    ],
)
def test_wrong_message_names_the_field(message: Any, field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        to_chat_message(message, "messages[3]")
    assert caught.value.field == field


def test_tool_carries_schema_and_strictness() -> None:
    schema = {"type": "object", "properties": {}}
    made = to_tool(
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "d",
                "parameters": schema,
                "strict": False,
            },
        },
        "tools[0]",
    )
    assert made == router_pb2.Tool(
        name="f",
        description="d",
        parameters_json=b'{"type":"object","properties":{}}',
        strict=False,
    )


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "web_search"}, "tools[0].type"),
        ({"type": "function", "function": {"name": 1}}, "tools[0].function.name"),
        ({"type": "function", "function": {"parameters": "x"}}, "tools[0].function.parameters"),
        ({"type": "function", "function": {"strict": "yes"}}, "tools[0].function.strict"),
        ({"type": "function", "function": {"colour": 1}}, "tools[0].function.colour"),
    ],
)
def test_wrong_tool_names_the_field(tool: Any, field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        to_tool(tool, "tools[0]")
    assert caught.value.field == field


def _generate(prompt: Any, sampling: Any) -> router_pb2.GenerateRequest:
    return generate_request(
        prompt,
        sampling,
        model="m",
        conversation_id="",
        extra_body=None,
        client_request_id="",
        disable_reuse=False,
    )


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": -1}, "sampling.max_tokens"),
        ({"max_tokens": 1.5}, "sampling.max_tokens"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop": [1]}, "sampling.stop"),
        ({"stop_token_ids": [-1]}, "sampling.stop_token_ids"),
        ({"seed": 2**63}, "sampling.seed"),
    ],
)
def test_wrong_sampling_parameter_names_the_field(sampling: Any, field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        _generate("p", sampling)
    assert caught.value.field == field


def test_wrong_token_id_names_the_field() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        _generate([1, -2], {})
    assert caught.value.field == "token_ids.ids"


def test_many_token_ids_travel_as_json() -> None:
    request = _generate(list(range(5000)), {})
    assert json.loads(request.token_ids_json) == list(range(5000))
    assert _generate(list(range(100)), {}).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize("wrong", [-2, 1.5, "a", None, [1]])
def test_a_wrong_one_among_many_token_ids_names_the_field(wrong: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        _generate([*range(5000), wrong], {})
    assert caught.value.field == "token_ids.ids"


def test_unknown_keyword_points_at_extra_body() -> None:
    with pytest.raises(TypeError, match="extra_body"):
        _generate("p", {"max_completion_tokens": 3})


def test_every_sampling_field_of_the_contract_has_a_keyword() -> None:
    assert set(Sampling.__annotations__) == set(router_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
