"""The members of an OpenAI body that kvloop knows, with type and bounds.

A value of the wrong type is refused here, before any worker is called, so that
no prefill is wasted on it. Members that are not listed pass through: the engine
judges them. null passes too, since it means "the engine's default" to most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError
from services.router.body import Member, decode, parse_object

_Object = dict[str, Raw]
_AtLeastOne = Annotated[int, Meta(ge=1)]
_NotNegative = Annotated[int, Meta(ge=0)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_StopString = Annotated[str, Meta(min_length=1)]
_Strings = list[str]
_XArg = str | int | float | list[str | int | float]


class _Typed(msgspec.Struct):
    """An object that says what it is, such as response_format."""

    type: str


class _Tool(msgspec.Struct):
    """One entry of `tools`."""

    type: str
    function: _Object | None = None


class _StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_COMMON: dict[str, Any] = {
    "max_tokens": _AtLeastOne,
    "temperature": Annotated[float, Meta(ge=0, le=2)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "top_k": Annotated[int, Meta(ge=-1)],
    "min_p": Annotated[float, Meta(ge=0, le=1)],
    "seed": Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)],
    "stop": _StopString | Annotated[list[_StopString], Meta(max_length=16)],
    "stop_token_ids": list[_NotNegative],
    "ignore_eos": bool,
    "min_tokens": _NotNegative,
    "frequency_penalty": _Penalty,
    "presence_penalty": _Penalty,
    "repetition_penalty": Annotated[float, Meta(gt=0)],
    "length_penalty": float,
    "n": Annotated[int, Meta(ge=1, le=128)],
    "use_beam_search": bool,
    "logit_bias": dict[str, Annotated[float, Meta(ge=-100, le=100)]],
    "prompt_logprobs": Annotated[int, Meta(ge=-1)],
    "allowed_token_ids": list[_NotNegative],
    "bad_words": _Strings,
    "include_stop_str_in_output": bool,
    "skip_special_tokens": bool,
    "spaces_between_special_tokens": bool,
    "add_special_tokens": bool,
    "truncate_prompt_tokens": Annotated[int, Meta(ge=-1)],
    "stream": bool,
    "stream_options": _StreamOptions,
    "echo": bool,
    "user": str,
    "response_format": _Typed,
    "structured_outputs": _Object,
    "priority": int,
    "return_token_ids": bool,
    "return_tokens_as_token_ids": bool,
    "cache_salt": Annotated[str, Meta(min_length=1)],
    "vllm_xargs": dict[str, _XArg],
}

_CHAT: dict[str, Any] = {
    **_COMMON,
    "max_completion_tokens": _AtLeastOne,
    "logprobs": bool,
    "top_logprobs": Annotated[int, Meta(ge=-1)],
    "tools": Annotated[list[_Tool], Meta(min_length=1)],
    "tool_choice": Literal["none", "auto", "required"] | _Typed,
    "parallel_tool_calls": bool,
    "reasoning_effort": str,
    "include_reasoning": bool,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "chat_template": str,
    "chat_template_kwargs": _Object,
    "documents": list[_Object],
    "mm_processor_kwargs": _Object,
    "metadata": dict[str, str],
    "store": bool,
    "service_tier": str,
}

_RESPONSES: dict[str, Any] = {
    **{
        name: _CHAT[name]
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "stream",
            "user",
            "structured_outputs",
            "priority",
            "cache_salt",
            "vllm_xargs",
            "top_logprobs",
            "parallel_tool_calls",
            "include_reasoning",
            "chat_template_kwargs",
            "mm_processor_kwargs",
            "metadata",
            "store",
            "service_tier",
        )
    },
    "max_output_tokens": _AtLeastOne,
    "instructions": str,
    "tools": list[_Typed],
    "tool_choice": Literal["none", "auto", "required"] | _Typed,
    "text": _Object,
    "reasoning": _Object,
    "include": _Strings,
    "truncation": Literal["auto", "disabled"],
    "background": bool,
    "previous_response_id": str,
    "conversation": str | _Object,
}

_COMPLETIONS: dict[str, Any] = {
    **_COMMON,
    "best_of": _AtLeastOne,
    "logprobs": Annotated[int, Meta(ge=-1)],
    "suffix": str,
}


def _decoders(fields: Mapping[str, Any]) -> dict[str, msgspec.json.Decoder[Any]]:
    return {name: msgspec.json.Decoder(wanted | None) for name, wanted in fields.items()}


_DECODERS = {
    common_pb2.API_CHAT_COMPLETIONS: _decoders(_CHAT),
    common_pb2.API_COMPLETIONS: _decoders(_COMPLETIONS),
    common_pb2.API_RESPONSES: _decoders(_RESPONSES),
}


def known_members(api: common_pb2.Api.ValueType) -> Sequence[str]:
    """Names of the members whose values are checked."""
    return list(_DECODERS[api])


_CALLED_BY_CLIENT = frozenset({"function", "custom"})
"""Types of tools in a response whose calls end the answer, for the client to make."""

_INTERNAL = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""What engines tell each other. From a caller it could name any address and any
other conversation's blocks."""

_TYPED_ONLY = {
    "conversation_id": "conversation_id",
    "disable_reuse": "disable_reuse",
    "client_request_id": "client_request_id",
    # Two requests with one id break the engine; see client_request_id instead.
    "request_id": "client_request_id",
}
"""Members that mean something to kvloop, and the request field that carries it."""


class Options(msgspec.Struct, frozen=True):
    """The checked members that kvloop itself acts on."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    min_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: str | None = None
    truncation: str | None = None
    instructions: str | None = None
    prompts: int = 1
    """Prompts in one completions body; set by whoever knows the body."""
    engine_tools: bool = False
    """Whether the engine itself may call tools, and go on after each."""

    @property
    def single_leg_feature(self) -> str | None:
        """The member that keeps this request on the decode worker alone.

        A hand-over is read by one sequence only, so several choices or beams
        cannot share it, nor can the parts of an answer in between which the engine
        calls tools; and what the prompt's logits give is computed where the prompt
        is, while the answer comes from the decode worker. Both legs must also cut
        the prompt at the same place.
        """
        wanted = {
            "prompt": self.prompts > 1,
            "n": (self.n or 1) > 1,
            "best_of": (self.best_of or 1) > 1,
            "use_beam_search": bool(self.use_beam_search),
            "prompt_logprobs": self.prompt_logprobs is not None,
            "echo": bool(self.echo),
            "truncate_prompt_tokens": (self.truncate_prompt_tokens or 0) < 0,
            "truncation": self.truncation == "auto",
            "tools": self.engine_tools,
        }
        return next((name for name, present in wanted.items() if present), None)

    @property
    def max_new_tokens(self) -> int | None:
        """Tokens the caller allows for the answer; None leaves it to the engine."""
        return self.max_completion_tokens or self.max_tokens or self.max_output_tokens


def check_members(api: common_pb2.Api.ValueType, members: Mapping[str, Member]) -> Options:
    """Check every known member of a body.

    Raises:
        InvalidFieldError: a value has the wrong type or is out of bounds, or
            two of them contradict each other.
    """
    decoders = _DECODERS[api]
    values = {
        name: decode(given.raw, decoders[name], given.path)
        for name, given in members.items()
        if name in decoders
    }
    _refuse_hidden_params(members)
    options = msgspec.convert(values, Options)
    if api == common_pb2.API_RESPONSES:
        _refuse_kept_state(values, members)
        types = {tool.type for tool in values.get("tools") or ()}
        options = msgspec.structs.replace(options, engine_tools=not types <= _CALLED_BY_CLIENT)
    limit = options.max_new_tokens
    if limit is not None and (options.min_tokens or 0) > limit:
        path = members["min_tokens"].path
        raise InvalidFieldError(f"{path} is above the most tokens allowed, {limit}", field=path)
    return options


def refuse_reserved(name: str, path: str) -> None:
    """Refuse a member that callers may not set in the body.

    Raises:
        InvalidFieldError: the name is reserved.
    """
    if name in _INTERNAL:
        raise InvalidFieldError(f"{path}: {name} is internal to kvloop", field=path)
    if name in _TYPED_ONLY:
        raise InvalidFieldError(
            f"{path}: use the request's field {_TYPED_ONLY[name]} instead", field=path
        )


def _refuse_kept_state(values: Mapping[str, Any], members: Mapping[str, Member]) -> None:
    """What only the engine that gave an earlier answer could know, and only while it lives."""
    for name in ("previous_response_id", "conversation", "background"):
        if values.get(name):
            raise InvalidFieldError(
                f"{members[name].path} needs an engine that keeps answers, and kvloop keeps none: "
                "any engine answers any turn; send all items so far as input",
                reason="STATELESS",
                field=members[name].path,
            )


def _refuse_hidden_params(members: Mapping[str, Member]) -> None:
    """vLLM hands vllm_xargs to the connector in the place of its own params."""
    given = members.get("vllm_xargs")
    if given is None or bytes(given.raw).strip() == b"null":
        return
    for name in parse_object(bytes(given.raw), given.path):
        if name in _INTERNAL:
            refuse_reserved(name, f"{given.path}.{name}")
