"""What decode's engine is asked for, in two parts: all that is known of a body before
prefill is done, and the transfer params. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvloop.errors import InvalidFieldError
from services.worker.engine import Api
from services.worker.legs import (
    KV_TRANSFER_PARAMS,
    RETAIN,
    TURN_ID,
    Body,
    Prompt,
    not_splittable,
    parse_body,
    splice,
    unsplittable_field,
    value,
)

_RETAIN_ONLY: dict[str, Any] = {"do_remote_prefill": False, "do_remote_decode": False}
_NOTHING_ASKED: dict[str, Any] = {"stream": False}
_OPTIONAL_BODY = msgspec.json.Decoder(Body | None)


@dataclass(frozen=True, slots=True)
class DecodeBody:
    """A client's body as decode's engine gets it, without transfer params."""

    head: bytes
    """A JSON object with one member at least, but for its closing brace."""
    unsplittable: str | None
    """Member that forbids running it in two legs, if there is one."""
    forward_usage: bool
    """False if the client's own stream would not have ended with a usage chunk."""

    def require_splittable(self) -> None:
        """Refuse it if it cannot run in two legs.

        Raises:
            InvalidFieldError: NOT_SPLITTABLE, names the member.
        """
        if self.unsplittable is not None:
            raise not_splittable(self.unsplittable)


def read_decode_body(
    api: Api, body: bytes, *, whole: bool, prompt: Prompt | None = None
) -> DecodeBody:
    """Read a client's body, and switch stream and usage on.

    Args:
        api: endpoint whose format the body has.
        body: of the client, a JSON object.
        whole: the reply shall come in one piece: the body stays as it is.
        prompt: the part of it that is known to be one value, and is not read.

    Raises:
        InvalidFieldError: as `parse_body`, or the body's stream_options are no
            object.
    """
    members = parse_body(body, prompt)
    if whole:
        sent: dict[str, Any] = members or _NOTHING_ASKED  # engines refuse it either way
    else:
        sent = members | {"stream": True}
        if api is not Api.RESPONSES:  # whose streams always end with usage
            sent["stream_options"] = _with_usage(members)
    return DecodeBody(
        head=msgspec.json.encode(sent)[:-1],
        unsplittable=unsplittable_field(api, members),
        forward_usage=whole or wants_usage_chunk(api, members),
    )


def rest_of_body(*, turn_id: str, params: bytes, retain: bool) -> bytes:
    """What follows on the head of a body: the transfer params, if any, and the brace.

    Args:
        turn_id: id of the turn.
        params: the prefill engine's hand-off; empty if there was none.
        retain: whether the engine shall keep the turn's KV at its end.

    Raises:
        InvalidFieldError: params is not a JSON object.
    """
    added = _decode_params(turn_id, params, retain)
    return b"," + msgspec.json.encode(added)[1:] if added else b"}"


def wants_usage_chunk(api: Api, members: Body) -> bool:
    """False if the client's own stream would not have ended with a usage chunk."""
    if api is Api.RESPONSES or value(members, "stream") is not True:
        return True  # the reply always has usage
    options = value(members, "stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


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
