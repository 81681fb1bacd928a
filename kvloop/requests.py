"""Builds requests from the arguments of the clients' methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from kvloop.errors import InvalidFieldError
from kvloop.messages import Message, encode_json, to_chat_message, to_tool
from kvloop.router.v1 import router_pb2

_LONG_PROMPT_TOKENS = 4096


class Sampling(TypedDict, total=False):
    """Sampling parameters, accepted as keyword arguments of `chat` and `generate`.

    What is left out, or None, takes the engine's default.
    """

    max_tokens: int | None
    """Tokens to generate at most. At least 1."""
    temperature: float | None
    """0 is greedy. 0 to 2."""
    top_p: float | None
    """Nucleus sampling mass. Above 0, at most 1."""
    top_k: int | None
    """Candidates kept; 0 or -1 keeps all."""
    min_p: float | None
    """Least probability relative to the best token. 0 to 1."""
    seed: int | None
    """Seed of the sampler."""
    stop: str | Sequence[str] | None
    """Strings that end the answer. At most 16."""
    stop_token_ids: Sequence[int] | None
    """Token ids that end the answer."""
    ignore_eos: bool | None
    """Go on past the end-of-sequence token."""
    min_tokens: int | None
    """Tokens to generate before an end is allowed."""
    frequency_penalty: float | None
    """-2 to 2."""
    presence_penalty: float | None
    """-2 to 2."""
    repetition_penalty: float | None
    """Above 0; 1 is neutral."""


def chat_request(
    messages: Sequence[Message | Mapping[str, Any]],
    sampling: Sampling,
    *,
    model: str,
    conversation_id: str,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    extra_body: Mapping[str, Any] | None,
    client_request_id: str,
    disable_reuse: bool,
) -> router_pb2.ChatRequest:
    """The request of one chat turn.

    Raises:
        InvalidFieldError: a value does not fit its field.
        TypeError: a sampling parameter is not known.
    """
    return router_pb2.ChatRequest(
        model=model,
        messages=[to_chat_message(m, f"messages[{i}]") for i, m in enumerate(messages)],
        conversation_id=conversation_id,
        sampling=_sampling_params(sampling),
        tools=[to_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
        tool_choice_json=b"" if tool_choice is None else encode_json(tool_choice, "tool_choice"),
        extra_body_json=encode_json(extra_body, "extra_body") if extra_body else b"",
        client_request_id=client_request_id,
        disable_reuse=disable_reuse,
        accept_batches=True,
    )


def generate_request(
    prompt: str | Sequence[int],
    sampling: Sampling,
    *,
    model: str,
    conversation_id: str,
    extra_body: Mapping[str, Any] | None,
    client_request_id: str,
    disable_reuse: bool,
) -> router_pb2.GenerateRequest:
    """The request of one completion turn.

    Raises:
        InvalidFieldError: a value does not fit its field.
        TypeError: a sampling parameter is not known.
    """
    request = router_pb2.GenerateRequest(
        model=model,
        conversation_id=conversation_id,
        sampling=_sampling_params(sampling),
        extra_body_json=encode_json(extra_body, "extra_body") if extra_body else b"",
        client_request_id=client_request_id,
        disable_reuse=disable_reuse,
        accept_batches=True,
    )
    if isinstance(prompt, str):
        request.text = prompt
        return request
    encoded = _long_prompt(prompt)
    if encoded is not None:
        request.token_ids_json = encoded
    else:
        request.token_ids.SetInParent()  # an empty list is still a choice of token ids
        _set(request.token_ids, "ids", prompt, "token_ids.ids")
    return request


def _long_prompt(prompt: Sequence[int]) -> bytes | None:
    """Many token ids as JSON, which is the cheapest form; None for all else.

    What goes into `token_ids.ids` instead is checked there, one by one.
    """
    if len(prompt) < _LONG_PROMPT_TOKENS:
        return None
    try:
        encoded = msgspec.json.encode(prompt)
    except TypeError:  # integers of a library's own
        return None
    return encoded if encoded.translate(None, b"0123456789,") == b"[]" else None


def _sampling_params(sampling: Sampling) -> router_pb2.SamplingParams:
    made = router_pb2.SamplingParams()
    for name, value in sampling.items():
        if name not in made.DESCRIPTOR.fields_by_name:
            raise TypeError(
                f"{name!r} is not a sampling parameter; other OpenAI fields go into extra_body"
            )
        if value is None:
            continue
        _set(made, name, [value] if isinstance(value, str) else value, f"sampling.{name}")
    return made


def _set(message: Any, name: str, value: object, path: str) -> None:
    """Set a field whose value comes from the caller and may be of any type."""
    try:
        if message.DESCRIPTOR.fields_by_name[name].is_repeated:
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(f"{path}: {error}", field=path) from error
