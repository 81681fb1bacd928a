"""How a client's request body becomes the body of a leg. Pure functions.

Bodies are taken apart into their top-level members only. A member that is not
touched goes on byte for byte, so numbers, nesting, nulls and vendor fields stay
what they were.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from kvloop.errors import InvalidFieldError
from services.worker.engine import Api

Body = dict[str, msgspec.Raw]

KV_TRANSFER_PARAMS = "kv_transfer_params"
TURN_ID = "kvloop_turn_id"
"""Member of kv_transfer_params by which the connector names a turn."""
RETAIN = "kvloop_retain"
"""Member of kv_transfer_params: false if no conversation wants the turn's KV."""

_CALLED_BY_CLIENT = frozenset({"function", "custom"})
"""Types of tools whose calls end the answer, for the client to make."""

_PROMPT_SHAPING = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
    }
)

_PLACEHOLDER = b"null"
_STRUCTURED = re.compile(rb'\s*\[\s*["\[]')
"""Begins a list of prompts, whether they are text or token ids."""
_BODY = msgspec.json.Decoder(Body)


class Prompt(NamedTuple):
    """Where a body has its prompt."""

    member: str
    """Name of the member whose value it is."""
    start: int
    """Offset of the value's first byte."""
    end: int
    """Offset behind its last byte."""


def parse_body(body: bytes, prompt: Prompt | None = None) -> Body:
    """The top-level members of a request body.

    Args:
        body: a JSON object.
        prompt: the part of it that is known to be one value, and is not read.

    Raises:
        InvalidFieldError: it is not a JSON object, or it brings transfer params
            of its own, which only kvloop may set.
    """
    around = body
    if prompt is not None:
        around = body[: prompt.start] + _PLACEHOLDER + body[prompt.end :]
    try:
        members = _BODY.decode(around)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidFieldError(
            f"body_json is not a JSON object: {error}", field="body_json"
        ) from error
    if prompt is not None:
        if bytes(members.get(prompt.member, b"")) != _PLACEHOLDER:
            raise InvalidFieldError(
                f"no member {prompt.member!r} lies at this place of body_json", field="prompt"
            )
        members[prompt.member] = msgspec.Raw(body[prompt.start : prompt.end])
    if KV_TRANSFER_PARAMS in members:
        raise InvalidFieldError(
            f"{KV_TRANSFER_PARAMS} is set by kvloop and must not be sent", field=KV_TRANSFER_PARAMS
        )
    return members


def unsplittable_field(api: Api, members: Body) -> str | None:
    """The member that forbids running the body in two legs, if there is one.

    A hand-off can be read once, so it serves one sequence. The decode engine
    does not compute a prompt that it pulls, so it knows nothing about that
    prompt's tokens. And both legs must cut the prompt at the same place.
    """
    if api is Api.RESPONSES:
        return _unsplittable_response_field(members)
    if api is Api.COMPLETIONS and _prompt_count(members) > 1:
        return "prompt"
    for name in ("n", "best_of"):
        if value(members, name) not in (None, 1):
            return name
    for name in ("use_beam_search", "echo"):
        if value(members, name) not in (None, False):
            return name
    if value(members, "prompt_logprobs") is not None:
        return "prompt_logprobs"
    truncate = value(members, "truncate_prompt_tokens")
    if isinstance(truncate, int) and truncate < 0:
        return "truncate_prompt_tokens"
    return None


def _unsplittable_response_field(members: Body) -> str | None:
    """As `unsplittable_field`, in the words of responses."""
    if value(members, "truncation") == "auto":
        return "truncation"
    tools = value(members, "tools")
    kinds = [tool.get("type") for tool in tools or () if isinstance(tool, dict)]
    # The engine calls its own tools in between, with the same params each time.
    return "tools" if any(kind not in _CALLED_BY_CLIENT for kind in kinds) else None


def require_splittable(api: Api, members: Body) -> None:
    """Refuse a body that cannot run in two legs.

    Raises:
        InvalidFieldError: NOT_SPLITTABLE, names the member.
    """
    if field := unsplittable_field(api, members):
        raise not_splittable(field)


def not_splittable(field: str) -> InvalidFieldError:
    """Says that a body cannot run in two legs because of this member."""
    return InvalidFieldError(
        f"{field} does not allow prefill and decode on different engines; "
        "run the decode leg alone, without transfer params",
        reason="NOT_SPLITTABLE",
        field=field,
    )


def tokenize_body(members: Body) -> bytes:
    """The body for /tokenize: only what shapes the prompt."""
    return _encode({name: raw for name, raw in members.items() if name in _PROMPT_SHAPING})


def prompt_token_ids(members: Body) -> list[int] | None:
    """The prompt of a completions body if it comes as token ids."""
    prompt = value(members, "prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return prompt
    return None


def splice(params: bytes, added: dict[str, Any]) -> bytes:
    """Transfer params with members put in front; all other bytes stay.

    Args:
        params: a JSON object.
        added: members to set. A member of that name is replaced.

    Raises:
        InvalidFieldError: params is not a JSON object.
    """
    opened = params.lstrip()
    if not opened.startswith(b"{"):
        raise InvalidFieldError(
            "transfer_params_json is not a JSON object", field="transfer_params_json"
        )
    if any(f'"{name}"'.encode() in params for name in added):
        try:
            rest = _BODY.decode(params)
        except msgspec.DecodeError as error:
            raise InvalidFieldError(
                f"transfer_params_json is not a JSON object: {error}",
                field="transfer_params_json",
            ) from error
        return _encode(added | {name: raw for name, raw in rest.items() if name not in added})
    inner = opened[1:].lstrip()
    separator = b"" if inner.startswith(b"}") else b","
    return _encode(added)[:-1] + separator + inner


def value(members: Body, name: str) -> Any:
    """The decoded value of a member; None if it is absent."""
    raw = members.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidFieldError(f"{name} is not valid JSON: {error}", field=name) from error


def _prompt_count(members: Body) -> int:
    raw = members.get("prompt", b"")
    if not _STRUCTURED.match(raw):
        return 1  # text, or the token ids of one prompt, which may be many
    try:
        return len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
    except msgspec.DecodeError:
        return 1  # for the engine to refuse


def _encode(members: dict[str, Any]) -> bytes:
    return msgspec.json.encode(members)
