"""What an HTTP client asks for, checked as the gRPC API checks it.

A body is taken apart into its top-level members and no further: whatever kvloop
does not know reaches the engine as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError
from services.router.body import Member, decode, encode, member, parse_object, place_of
from services.router.history import History, beginning_id, read_history, read_input
from services.router.identity import Caller, one_conversation_id
from services.router.openai_fields import Options, check_members, refuse_reserved
from services.router.request import (
    TurnRequest,
    check_conversation_id,
    check_model,
    max_new_tokens_path,
)
from services.router.token_ids import count_token_ids

_BODY = "body"

CONVERSATION_HEADERS = ("x-conversation-id", "x-session-id")
"""Headers that can name the conversation, best first."""


class _Message(msgspec.Struct):
    """One entry of `messages`; what else is in it is the engine's affair."""

    role: str


_STRING = msgspec.json.Decoder(str)
_OPTIONAL_STRING = msgspec.json.Decoder(str | None)
_OPTIONAL_BOOL = msgspec.json.Decoder(bool | None)
_MESSAGES = msgspec.json.Decoder(list[_Message])
_INPUT = msgspec.json.Decoder(str | list[dict[str, msgspec.Raw]])
_TOKEN_IDS = msgspec.json.Decoder(list[int])
_PROMPT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(str | list[str | int | list[int]] | None)


@dataclass(frozen=True)
class _Own:
    """Members of the body that are for kvloop, and for no engine."""

    conversation_id: str | None
    disable_reuse: bool
    request_id: str | None


@dataclass(frozen=True)
class _Prompt:
    """What a request's prompt is."""

    path: str
    """Member that holds it."""
    count: int = 1
    """How many there are."""
    one: str | list[int] | msgspec.Raw | None = None
    """The prompt of a completion, if it is one. Many token ids are not decoded."""
    tokens: int | None = None
    """Tokens in it, if it is tokenized."""


@dataclass(frozen=True)
class ReadingRules:
    """How requests are read."""

    derive_conversations: bool
    """Recognise chats without a conversation id by their history."""
    tell_cached_tokens: bool
    """Say in `usage` how many prompt tokens were not computed."""


def read_request(
    api: common_pb2.Api.ValueType,
    body: bytes,
    headers: Mapping[str, str],
    caller: Caller,
    rules: ReadingRules,
) -> TurnRequest:
    """The turn that a request asks for.

    Args:
        api: endpoint that it came to.
        body: of the request.
        headers: of the request, names in lower case.
        caller: whose request it is.
        rules: how to read it.

    Raises:
        InvalidFieldError: a member is missing, of the wrong type or out of bounds.
    """
    raw = parse_object(body, _BODY)
    own = _take_own(raw)
    members = {name: Member(value, name) for name, value in raw.items()}
    for name in members:
        refuse_reserved(name, name)
    model = _required(members, "model", _STRING)
    check_model(model)
    prompt = _check_prompt(api, members)
    options = msgspec.structs.replace(check_members(api, members), prompts=prompt.count)
    if api != common_pb2.API_RESPONSES:
        _check_stream_options(options)
    conversation_id = _conversation_id(own, headers)
    history = None
    if rules.derive_conversations and not conversation_id:
        if prompt.one is not None:
            one = prompt.one
            if isinstance(one, msgspec.Raw):
                one = decode(one, _TOKEN_IDS, prompt.path)
            conversation_id = beginning_id(one, options.cache_salt)
        else:
            history = _history(members, options)
    salt = caller.cache_salt(options.cache_salt)
    if salt != options.cache_salt:
        members["cache_salt"] = member(salt, "cache_salt")
    values = {name: given.raw for name, given in members.items()}
    return TurnRequest(
        api=api,
        model=model,
        body_json=encode(values),
        prompt=place_of(values, prompt.path),
        prompt_path=prompt.path,
        options=options,
        max_new_tokens_path=max_new_tokens_path(members, options),
        prompt_tokens=prompt.tokens,
        conversation_id=conversation_id,
        client_request_id=own.request_id or "",
        disable_reuse=own.disable_reuse,
        tenant=caller.tenant,
        history=history,
        whole=not options.stream,
        tell_cached_tokens=rules.tell_cached_tokens,
    )


def _take_own(raw: dict[str, msgspec.Raw]) -> _Own:
    """Remove and read what no engine shall see.

    A `request_id` is one of them: engines break over two requests with one id,
    so it comes back in a header and is not used.
    """

    def take(name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
        value = raw.pop(name, None)
        return None if value is None else decode(value, decoder, name)

    return _Own(
        conversation_id=take("conversation_id", _OPTIONAL_STRING),
        disable_reuse=bool(take("disable_reuse", _OPTIONAL_BOOL)),
        request_id=take("request_id", _OPTIONAL_STRING),
    )


def _required(members: Mapping[str, Member], name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    given = members.get(name)
    if given is None:
        raise InvalidFieldError(f"{name} is missing", field=name)
    return decode(given.raw, decoder, name)


def _check_prompt(api: common_pb2.Api.ValueType, members: Mapping[str, Member]) -> _Prompt:
    if api == common_pb2.API_RESPONSES:
        _required(members, "input", _INPUT)
        return _Prompt("input")
    if api == common_pb2.API_CHAT_COMPLETIONS:
        if not _required(members, "messages", _MESSAGES):
            raise InvalidFieldError(
                "messages is empty; a turn needs at least one", field="messages"
            )
        return _Prompt("messages")
    if "prompt" not in members and "prompt_embeds" in members:
        return _Prompt("prompt_embeds")
    tokens = count_token_ids(members["prompt"].raw) if "prompt" in members else None
    if tokens:
        return _Prompt("prompt", one=members["prompt"].raw, tokens=tokens)
    prompt = _required(members, "prompt", _PROMPT)
    if not prompt:
        raise InvalidFieldError("prompt is empty", field="prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _Prompt("prompt", one=prompt)
    if all(isinstance(token, int) for token in prompt):
        return _Prompt("prompt", one=prompt, tokens=len(prompt))
    return _Prompt("prompt", count=len(prompt))


def _history(members: Mapping[str, Member], options: Options) -> History | None:
    """What was said before, as far as the request tells."""
    if "messages" in members:
        return read_history(members["messages"].raw, options.cache_salt)
    # Messages in the format of one family of models are of no form known here.
    if "input" in members and "previous_input_messages" not in members:
        return read_input(members["input"].raw, options.instructions, options.cache_salt)
    return None


def _check_stream_options(options: Options) -> None:
    """Refuse what the prefill leg would not see, and the decode leg would refuse."""
    if options.stream_options is not None and not options.stream:
        raise InvalidFieldError(
            "Stream options can only be defined when `stream=True`.", field="stream_options"
        )


def _conversation_id(own: _Own, headers: Mapping[str, str]) -> str:
    named = {"conversation_id": own.conversation_id or ""}
    named |= {name: headers.get(name, "") for name in CONVERSATION_HEADERS}
    conversation_id = one_conversation_id(named)
    check_conversation_id(conversation_id, required=False)
    return conversation_id
