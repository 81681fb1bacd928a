"""What clients use of the OpenAI endpoints, as requests to compare replies to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

_HI = [{"role": "user", "content": "Say something about the sea and the wind."}]
_LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"far": {"type": "boolean"}},
            "required": ["far"],
            "additionalProperties": False,
        },
    },
}
_LOOK_FLAT = {"type": "function", **_LOOK["function"]}  # type: ignore[dict-item]
_SCHEMA_FLAT = {
    "type": "json_schema",
    "schema": _LOOK["function"]["parameters"],  # type: ignore[index]
}
_END_OF_THINKING = "4"
"""Token of the small model."""
_THINKING = {
    "messages": _HI,
    "chat_template_kwargs": {"enable_thinking": True},
    # The model is random: this makes it end its reasoning now and then.
    "logit_bias": {_END_OF_THINKING: 8},
    "max_tokens": 60,
}
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": _LOOK["function"]["parameters"]},  # type: ignore[index]
}


@dataclass(frozen=True)
class Feature:
    """One thing that clients use."""

    name: str
    path: str
    members: Mapping[str, Any]
    through: str = ""
    """Why it is not the same through kvloop; empty if it has to be."""
    through_stream: str = ""
    """The same, of streams alone."""
    shows: str = ""
    """What the engine's own reply must hold, so that the feature is really used."""


FEATURES = [
    Feature("chat", CHAT, {"messages": _HI}),
    Feature(
        "system and assistant messages, content in parts",
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "You are brief."},
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
                {"role": "assistant", "content": "hi"},
                *_HI,
            ]
        },
    ),
    Feature(
        "content: null beside tool calls",
        CHAT,
        {
            "messages": [
                *_HI,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "a",
                            "type": "function",
                            "function": {"name": "look", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "a", "content": "waves"},
            ]
        },
    ),
    Feature(
        "tools, tool_choice: none", CHAT, {"messages": _HI, "tools": [_LOOK], "tool_choice": "none"}
    ),
    Feature("tools, tool_choice: auto", CHAT, {"messages": _HI, "tools": [_LOOK]}),
    Feature("reasoning and content", CHAT, _THINKING, shows='"content": "'),
    Feature(
        "reasoning alone, cut at max_tokens",
        CHAT,
        {"messages": _HI, "chat_template_kwargs": {"enable_thinking": True}},
        shows='"reasoning": "',
    ),
    Feature("include_reasoning: false", CHAT, {**_THINKING, "include_reasoning": False}),
    Feature(
        "reasoning in the history",
        CHAT,
        {
            "messages": [
                *_HI,
                {"role": "assistant", "content": "waves", "reasoning_content": "what is there?"},
                *_HI,
            ]
        },
    ),
    Feature(
        "tools, one function named",
        CHAT,
        {
            "messages": _HI,
            "tools": [_LOOK],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "max_tokens": 80,
        },
        shows='"arguments": "{',
    ),
    Feature(
        "tools, tool_choice: required",
        CHAT,
        {"messages": _HI, "tools": [_LOOK], "tool_choice": "required", "max_tokens": 80},
        shows='"arguments": "{',
    ),
    Feature(
        "response_format: json_schema",
        CHAT,
        {"messages": _HI, "response_format": _SCHEMA, "max_tokens": 40},
        shows='"far',
    ),
    Feature(
        "response_format: json_object",
        CHAT,
        {"messages": _HI, "response_format": {"type": "json_object"}},
        shows='"content": "{',
    ),
    Feature(
        "structured_outputs: choice",
        CHAT,
        {"messages": _HI, "structured_outputs": {"choice": ["port", "starboard"]}},
        shows="finish_reason",
    ),
    Feature(
        "logprobs with top_logprobs",
        CHAT,
        {"messages": _HI, "logprobs": True, "top_logprobs": 2},
        shows='"top_logprobs": [{',
    ),
    Feature(
        "n: 3", CHAT, {"messages": _HI, "n": 3, "temperature": 0.7, "seed": 7}, shows='"index": 2'
    ),
    Feature("stop strings", CHAT, {"messages": _HI, "stop": ["a", "e"]}, shows='"stop_reason": "'),
    Feature(
        "stop strings, kept in the output",
        CHAT,
        {"messages": _HI, "stop": ["a", "e"], "include_stop_str_in_output": True},
        shows='"finish_reason": "stop"',
    ),
    Feature(
        "max_completion_tokens: 1",
        CHAT,
        {"messages": _HI, "max_completion_tokens": 1},
        shows='"finish_reason": "length"',
    ),
    Feature("min_tokens", CHAT, {"messages": _HI, "min_tokens": 12, "max_tokens": 12}),
    Feature("seeded sampling", CHAT, {"messages": _HI, "temperature": 0.9, "seed": 11}),
    Feature(
        "penalties and logit_bias",
        CHAT,
        {
            "messages": _HI,
            "presence_penalty": 1.5,
            "frequency_penalty": 0.5,
            "logit_bias": {"300": 5},
        },
    ),
    Feature("return_token_ids", CHAT, {"messages": _HI, "return_token_ids": True}),
    Feature("prompt_logprobs (chat)", CHAT, {"messages": _HI, "prompt_logprobs": 1}),
    Feature("unknown members", CHAT, {"messages": _HI, "x_vendor": {"a": [1.5, None]}}),
    Feature("completion of text", COMPLETIONS, {"prompt": "the sea and"}),
    Feature("completion of token ids", COMPLETIONS, {"prompt": [300, 301, 302, 303]}),
    Feature("several prompts", COMPLETIONS, {"prompt": ["the sea", "the wind"]}),
    Feature("completion logprobs", COMPLETIONS, {"prompt": "the sea", "logprobs": 2}),
    Feature(
        "completion with n: 2",
        COMPLETIONS,
        {"prompt": "the sea", "n": 2, "temperature": 0.7, "seed": 7},
        shows='"index": 1',
    ),
    Feature(
        "completion with stop strings",
        COMPLETIONS,
        {"prompt": "the sea", "stop": ["a", "e"]},
        shows='"stop_reason": "',
    ),
    Feature("echo with logprobs", COMPLETIONS, {"prompt": "the sea", "echo": True, "logprobs": 1}),
    Feature(
        "prompt_logprobs (completion)", COMPLETIONS, {"prompt": "the sea", "prompt_logprobs": 1}
    ),
    Feature(
        "error: model not served",
        CHAT,
        {"messages": _HI, "model": "other"},
        "status and type are the same, the message is kvloop's",
    ),
    Feature("error: content of a wrong type", CHAT, {"messages": [{"role": "user", "content": 7}]}),
    Feature(
        "error: no messages",
        CHAT,
        {"messages": []},
        "refused by kvloop, before any engine is asked",
    ),
    Feature(
        "error: negative temperature",
        CHAT,
        {"messages": _HI, "temperature": -1},
        "status is the same, the message is kvloop's",
    ),
    Feature(
        "error: unknown token id",
        COMPLETIONS,
        {"prompt": [10**6]},
        through_stream="the same error as an HTTP status, where vLLM sends 200 and an error event",
    ),
    Feature("response to text", RESPONSES, {"input": "the sea and"}, shows='"output_text"'),
    Feature(
        "response to items, with instructions",
        RESPONSES,
        {
            "instructions": "You are brief.",
            "input": [
                *_HI,
                {"type": "message", "role": "assistant", "content": "waves"},
                {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
            ],
        },
    ),
    Feature(
        "response to a tool's output",
        RESPONSES,
        {
            "tools": [_LOOK_FLAT],
            "tool_choice": "none",
            "input": [
                *_HI,
                {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "waves"},
            ],
        },
    ),
    Feature(
        "response with one function named",
        RESPONSES,
        {
            "input": "look",
            "tools": [_LOOK_FLAT],
            "tool_choice": {"type": "function", "name": "look"},
            "max_output_tokens": 80,
        },
        shows='"function_call"',
    ),
    Feature(
        "response with text.format: json_schema",
        RESPONSES,
        {
            "input": "look",
            "max_output_tokens": 80,
            "text": {"format": {"name": "answer", **_SCHEMA_FLAT}},
        },
        shows='"far',
    ),
    Feature(
        "response with reasoning.effort",
        RESPONSES,
        {"input": "look", "reasoning": {"effort": "medium"}},
    ),
    Feature(
        "response with logprobs",
        RESPONSES,
        {"input": "look", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        shows='"logprobs": [{',
    ),
    Feature(
        "response with seeded sampling", RESPONSES, {"input": "x", "temperature": 1, "seed": 3}
    ),
    Feature("response with truncation: auto", RESPONSES, {"input": "x", "truncation": "auto"}),
    Feature("response, error: input of a wrong type", RESPONSES, {"input": [{"role": 7}]}),
    Feature(
        "response, previous_response_id",
        RESPONSES,
        {"input": "x", "previous_response_id": "resp_1"},
        "refused by kvloop: only the engine that gave it could know it",
    ),
    Feature(
        "response, background: true",
        RESPONSES,
        {"input": "x", "background": True},
        "refused by kvloop: only the engine that gave it could know it",
    ),
]
