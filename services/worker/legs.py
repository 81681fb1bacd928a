"""How a client's request body becomes the body of a leg. Pure functions.

Bodies are taken apart into their top-level members only. A member that is not
touched goes on byte for byte, so numbers, nesting, nulls and vendor fields stay
what they were.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvloop.errors import InvalidFieldError
from services.worker.engine import Api

Body = dict[str, msgspec.Raw]

KV_TRANSFER_PARAMS = "kv_transfer_params"
TURN_ID = "kvloop_turn_id"
"""Member of kv_transfer_params by which the connector names a turn."""
RETAIN = "kvloop_retain"
"""Member of kv_transfer_params: false if no conversation wants the turn's KV."""

_PREFILL_DROPS = frozenset(
    {
        # would ask for other than one token
        "max_completion_tokens",
        "min_tokens",
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        # could end the token as "stop", for which some versions hand nothing over
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        # need a stream or a second token, or only swell a reply that nobody reads
        "stream_options",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "echo",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_prompt_text",
        # a name for the request, over which a repeated leg would stumble
        "request_id",
    }
)

_FIRST_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_RETAIN_ONLY: dict[str, Any] = {"do_remote_prefill": False, "do_remote_decode": False}

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

_BODY = msgspec.json.Decoder(Body)
_OPTIONAL_BODY = msgspec.json.Decoder(Body | None)


def parse_body(body: bytes) -> Body:
    """The top-level members of a request body.

    Raises:
        InvalidFieldError: it is not a JSON object, or it brings transfer params
            of its own, which only kvloop may set.
    """
    try:
        members = _BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidFieldError(
            f"body_json is not a JSON object: {error}", field="body_json"
        ) from error
    if KV_TRANSFER_PARAMS in members:
        raise InvalidFieldError(
            f"{KV_TRANSFER_PARAMS} is set by kvloop and must not be sent", field=KV_TRANSFER_PARAMS
        )
    return members


def prefill_body(members: Body, *, turn_id: str, handle: bytes) -> bytes:
    """A body for which the engine emits one token and hands the prompt's KV over.

    Members that shape the prompt (tools, response_format, template arguments,
    ...) stay: the legs must see the same prompt.

    Args:
        members: of the client's body.
        turn_id: id of the turn.
        handle: params that a decode engine left behind; empty for none.
    """
    added = {TURN_ID: turn_id}
    params = splice(handle, added) if handle else _encode(added | _FIRST_PREFILL)
    kept = {name: value for name, value in members.items() if name not in _PREFILL_DROPS}
    return _encode(
        kept
        | {
            "max_tokens": 1,
            "stream": False,
            "ignore_eos": True,
            KV_TRANSFER_PARAMS: msgspec.Raw(params),
        }
    )


def decode_body(members: Body, *, turn_id: str, params: bytes, retain: bool) -> bytes:
    """The client's body, streamed and with usage.

    Args:
        members: of the client's body.
        turn_id: id of the turn.
        params: the prefill engine's hand-off; empty if there was none.
        retain: whether the engine shall keep the turn's KV at its end.
    """
    streamed: dict[str, Any] = {"stream": True, "stream_options": _with_usage(members)}
    return _encode(members | streamed | _decode_params(turn_id, params, retain))


def whole_decode_body(members: Body, *, turn_id: str, params: bytes, retain: bool) -> bytes:
    """The client's body for a reply in one piece. Arguments as for `decode_body`."""
    return _encode(members | _decode_params(turn_id, params, retain))


def wants_usage_chunk(members: Body) -> bool:
    """False if the client's own stream would not have ended with a usage chunk."""
    if value(members, "stream") is not True:
        return True  # a reply in one piece always has usage
    options = value(members, "stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def unsplittable_field(api: Api, members: Body) -> str | None:
    """The member that forbids running the body in two legs, if there is one.

    A hand-off can be read once, so it serves one sequence. The decode engine
    does not compute a prompt that it pulls, so it knows nothing about that
    prompt's tokens. And both legs must cut the prompt at the same place.
    """
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


def require_splittable(api: Api, members: Body) -> None:
    """Refuse a body that cannot run in two legs.

    Raises:
        InvalidFieldError: NOT_SPLITTABLE, names the member.
    """
    if field := unsplittable_field(api, members):
        raise InvalidFieldError(
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


def _decode_params(turn_id: str, params: bytes, retain: bool) -> dict[str, Any]:
    """The member that makes the engine pull, or retain, or both; none for neither."""
    if params:
        added: dict[str, Any] = {TURN_ID: turn_id}
        if not retain:
            added[RETAIN] = False
        return {KV_TRANSFER_PARAMS: msgspec.Raw(splice(params, added))}
    if retain:
        # Whatever carries transfer params is retained by the engine at its end.
        return {KV_TRANSFER_PARAMS: {TURN_ID: turn_id} | _RETAIN_ONLY}
    return {}


def _with_usage(members: Body) -> dict[str, Any]:
    raw = members.get("stream_options")
    try:
        options = _OPTIONAL_BODY.decode(raw) if raw is not None else None
    except msgspec.DecodeError as error:
        raise InvalidFieldError(
            f"stream_options is not a JSON object: {error}", field="stream_options"
        ) from error
    return (options or {}) | {"include_usage": True}


def _prompt_count(members: Body) -> int:
    raw = bytes(members.get("prompt", b"")).lstrip()
    if not raw.startswith(b"[") or raw[1:].lstrip()[:1] not in (b'"', b"["):
        return 1  # text, or the token ids of one prompt, which may be many
    try:
        return len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
    except msgspec.DecodeError:
        return 1  # for the engine to refuse


def _encode(members: dict[str, Any]) -> bytes:
    return msgspec.json.encode(members)
