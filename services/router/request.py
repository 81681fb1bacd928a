"""What a caller asks for, checked and turned into one OpenAI body.

Everything that can be refused without a worker is refused here, with the path
of the field at fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError
from kvloop.router.v1 import router_pb2
from services.router.body import Member, Span, encode, member, parse_object, place_of
from services.router.history import History
from services.router.identity import ANYONE, DEFAULT_TENANT, Caller
from services.router.messages import openai_messages, openai_tools
from services.router.openai_fields import Options, check_members, refuse_reserved
from services.router.token_ids import count_token_ids

_MAX_ID_CHARS = 256
_EXTRA = "extra_body_json"


@dataclass(frozen=True)
class TurnRequest:
    """One turn as the pipeline needs it, whatever API it came by."""

    api: common_pb2.Api.ValueType
    """Endpoint whose format the body has."""
    model: str
    """Served model name."""
    body_json: bytes
    """The OpenAI request body."""
    prompt_path: str
    """Field that holds the prompt, for error messages."""
    options: Options
    """Checked members of the body that kvloop acts on."""
    max_new_tokens_path: str = ""
    """Field that limits the answer, for error messages; empty if none does."""
    prompt_tokens: int | None = None
    """Tokens in the prompt, if it came tokenized."""
    conversation_id: str = ""
    """Conversation, or empty."""
    client_request_id: str = ""
    """The caller's own id; echoed, never used inside."""
    disable_reuse: bool = False
    """Recompute everything and leave retained KV alone."""
    tenant: str = DEFAULT_TENANT
    """Owner of the conversation."""
    history: History | None = None
    """What names the conversation if it has no id."""
    whole: bool = False
    """The answer is wanted in one piece."""
    prompt: Span | None = None
    """Where the prompt lies in body_json; None if it is not told."""
    tell_cached_tokens: bool = False
    """Whether `usage` shall say how many prompt tokens were not computed."""

    @property
    def retains(self) -> bool:
        """Whether the turn may use and leave behind retained KV."""
        return (
            bool(self.conversation_id or self.history)
            and not self.disable_reuse
            and self.options.single_leg_feature is None
        )

    @property
    def miss_reason(self) -> common_pb2.MissReason.ValueType:
        """Why the ledger is not asked; unspecified if it is."""
        if self.disable_reuse:
            return common_pb2.MISS_REASON_REUSE_DISABLED
        if self.options.single_leg_feature is not None:
            return common_pb2.MISS_REASON_UNSUPPORTED
        if not (self.conversation_id or self.history):
            return common_pb2.MISS_REASON_NO_CONVERSATION
        return common_pb2.MISS_REASON_UNSPECIFIED


def chat_turn(request: router_pb2.ChatRequest, caller: Caller = ANYONE) -> TurnRequest:
    """The turn that a ChatRequest asks for.

    Raises:
        InvalidFieldError: a field is missing, of the wrong type or out of bounds.
    """
    _check_ids(request)
    members = {
        "model": member(request.model, "model"),
        "messages": member(openai_messages(request.messages), "messages"),
    }
    if request.tools:
        members["tools"] = member(openai_tools(request.tools), "tools")
    if request.tool_choice_json:
        members["tool_choice"] = _opaque(request.tool_choice_json, "tool_choice_json")
    return _turn(request, caller, common_pb2.API_CHAT_COMPLETIONS, members, prompt_path="messages")


def generate_turn(request: router_pb2.GenerateRequest, caller: Caller = ANYONE) -> TurnRequest:
    """The turn that a GenerateRequest asks for.

    Raises:
        InvalidFieldError: a field is missing, of the wrong type or out of bounds.
    """
    _check_ids(request)
    tokens: int | None = None
    path = request.WhichOneof("prompt") or "text"
    match path:
        case "text":
            prompt = member(request.text, path)
        case "token_ids":
            ids = request.token_ids.ids[:]
            prompt = member(ids, path)
            tokens = len(ids)
        case "token_ids_json":
            tokens = count_token_ids(request.token_ids_json)
            if tokens is None:
                raise InvalidFieldError("token_ids_json is no array of integers", field=path)
            prompt = Member(msgspec.Raw(request.token_ids_json), path)
    if not (request.text or tokens):
        raise InvalidFieldError("the prompt is empty; set text or token_ids", field=path)
    members = {"model": member(request.model, "model"), "prompt": prompt}
    return _turn(
        request,
        caller,
        common_pb2.API_COMPLETIONS,
        members,
        prompt_path=path,
        prompt_tokens=tokens,
    )


def check_model(model: str) -> None:
    """Check the form of a model name.

    Raises:
        InvalidFieldError: it is empty or too long.
    """
    if not 1 <= len(model) <= _MAX_ID_CHARS:
        raise InvalidFieldError(f"model must have 1 to {_MAX_ID_CHARS} characters", field="model")


def check_conversation_id(conversation_id: str, *, required: bool) -> None:
    """Check the form of a conversation id.

    Raises:
        InvalidFieldError: it is too long, holds a NUL, or is empty though required.
    """
    if "\0" in conversation_id:
        raise InvalidFieldError(
            "conversation_id must not hold NUL characters", field="conversation_id"
        )
    if len(conversation_id) > _MAX_ID_CHARS or (required and not conversation_id):
        raise InvalidFieldError(
            f"conversation_id must have {int(required)} to {_MAX_ID_CHARS} characters",
            field="conversation_id",
        )


def _check_ids(request: router_pb2.ChatRequest | router_pb2.GenerateRequest) -> None:
    check_model(request.model)
    check_conversation_id(request.conversation_id, required=False)


def _turn(
    request: router_pb2.ChatRequest | router_pb2.GenerateRequest,
    caller: Caller,
    api: common_pb2.Api.ValueType,
    members: dict[str, Member],
    *,
    prompt_path: str,
    prompt_tokens: int | None = None,
) -> TurnRequest:
    members |= _sampling(request.sampling)
    if request.extra_body_json:
        members = _with_extra(members, request.extra_body_json)
    options = check_members(api, members)
    salt = caller.cache_salt(options.cache_salt)
    if salt != options.cache_salt:
        members["cache_salt"] = member(salt, "cache_salt")
    values = {name: given.raw for name, given in members.items()}
    return TurnRequest(
        api=api,
        model=request.model,
        body_json=encode(values),
        prompt=place_of(values, "messages" if "messages" in values else "prompt"),
        prompt_path=prompt_path,
        options=options,
        max_new_tokens_path=max_new_tokens_path(members, options),
        prompt_tokens=prompt_tokens,
        conversation_id=request.conversation_id,
        client_request_id=request.client_request_id,
        disable_reuse=request.disable_reuse,
        tenant=caller.tenant,
    )


def max_new_tokens_path(members: Mapping[str, Member], options: Options) -> str:
    """Path of the member that limits the answer; empty if none does."""
    limit = members.get("max_completion_tokens") if options.max_completion_tokens else None
    limit = limit or members.get("max_tokens") or members.get("max_output_tokens")
    return limit.path if limit else ""


def _sampling(sampling: router_pb2.SamplingParams) -> dict[str, Member]:
    """Members for the fields that are set; proto and OpenAI use the same names."""
    members = {}
    for field, value in sampling.ListFields():
        path = f"sampling.{field.name}"
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidFieldError(f"{path} is not a finite number", field=path)
        plain = value if isinstance(value, int | float) else list(value)
        members[field.name] = member(plain, path)
    return members


def _with_extra(typed: dict[str, Member], extra_body_json: bytes) -> dict[str, Member]:
    members = dict(typed)
    for name, raw in parse_object(extra_body_json, _EXTRA).items():
        path = f"{_EXTRA}.{name}"
        refuse_reserved(name, path)
        if name in typed:
            raise InvalidFieldError(f"{path} is set by {typed[name].path} too", field=path)
        members[name] = Member(raw, path)
    return members


def _opaque(data: bytes, path: str) -> Member:
    """JSON text of any kind, checked by the table of known members later."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise InvalidFieldError(f"{path} is not valid UTF-8", field=path) from error
    return Member(msgspec.Raw(data), path)
