"""Bodies that vLLM refuses, with its status, type and param; and those it takes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.sim.api_errors import ApiError
from services.sim.api_requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    check,
    check_prompt,
    parse,
    token_limit,
)

_MESSAGES = [{"role": "user", "content": "hi"}]


def _chat(**members: object) -> ChatRequest:
    return parse(json.dumps({"messages": _MESSAGES} | members).encode(), ChatRequest)


def _completion(**members: object) -> CompletionRequest:
    return parse(json.dumps({"prompt": "hi"} | members).encode(), CompletionRequest)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b"{}", "body.messages"),
        (b'{"messages": "hi"}', "body.messages"),
        (b'{"messages": ["hi"]}', "body.messages.0"),
        (b'{"messages": [], "max_tokens": "many"}', "body.max_tokens"),
        (
            b'{"messages": [], "stream_options": {"include_usage": 7}}',
            "body.stream_options.include_usage",
        ),
        (b'{"messages": [], "kv_transfer_params": [1]}', "body.kv_transfer_params"),
        (b'{"messages": [], "stop": 3}', "body.stop"),
    ],
)
def test_a_malformed_body_names_the_field(body: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, ChatRequest)
    error = msgspec.json.decode(caught.value.to_json())["error"]
    assert (error["code"], error["type"], error["param"]) == (400, "Bad Request", param)
    assert error["message"].startswith("1 validation error:\n")
    assert caught.value.while_parsing


def test_numbers_in_quotes_are_taken_as_numbers() -> None:
    assert _chat(max_tokens="5").max_tokens == 5


def test_fields_of_other_versions_are_ignored() -> None:
    assert _chat(brand_new_field={"a": 1}, top_k=5).choices == 1


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, None),
        ({"n": 2, "temperature": 0}, None),
        ({"min_tokens": -1}, None),
        ({"min_tokens": 9, "max_tokens": 5}, None),
        ({"stop": ["a", ""]}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [{"function": {"name": "f"}}]}, "tool_choice"),
    ],
)
def test_values_out_of_range_are_refused(members: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        check(_chat(**members), 4096)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "request_",
    [_chat(), _chat(n=3, temperature=0.5, seed=1), _completion(logprobs=3, max_tokens=1)],
)
def test_ordinary_requests_pass(request_: GenerateRequest) -> None:
    check(request_, 4096)


def test_the_newer_limit_wins_and_completions_have_a_default() -> None:
    assert token_limit(_chat(max_tokens=5, max_completion_tokens=7)) == ("max_completion_tokens", 7)
    assert token_limit(_chat()) == ("max_tokens", None)
    assert token_limit(_completion()) == ("max_tokens", 16)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_comes_as_text_or_tokens_one_or_several(
    prompt: object, expected: list[Any]
) -> None:
    assert _completion(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", [5, [], {"a": 1}, [1, "a"], [[]], [-1], [1.5], [True]])
def test_a_prompt_of_another_type_is_refused(prompt: object) -> None:
    with pytest.raises(ApiError, match="validation error"):
        _completion(prompt=prompt).prompts()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "cannot be empty"),
        ([1] * 11, "maximum context length is 10 tokens. However, your prompt contains 11 input"),
        ([5, 100], "Token id 100 is out of vocabulary"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_refused(tokens: list[int], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        check_prompt(tokens, 10, 100)
    assert caught.value.type == "BadRequestError"
