"""Page tokens: opaque to callers, bound to the query that made them."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, TypeVar

import msgspec

from kvloop.errors import InvalidFieldError
from services.kvmeta.model import ConversationKey
from services.kvmeta.store import PinPosition, Position

T = TypeVar("T")

# A token may be forged: these keep it within what a database can compare.
_Text = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^\x00]*\Z")]
_Time = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _ConversationToken(msgspec.Struct, array_like=True, tag="c", forbid_unknown_fields=True):
    query: list[str]
    commit_time_us: _Time
    model: _Text
    conversation_id: _Text


class _WorkerToken(msgspec.Struct, array_like=True, tag="w", forbid_unknown_fields=True):
    query: list[str]
    worker_id: _Text


class _PinToken(msgspec.Struct, array_like=True, tag="p", forbid_unknown_fields=True):
    query: list[str]
    worker_id: _Text
    commit_time_us: _Time
    tenant: _Text
    model: _Text
    conversation_id: _Text


def conversation_token(query: list[str], last: Position) -> str:
    """The token of the page after `last`, for the same query only."""
    return _encode(_ConversationToken(query, last.commit_time_us, last.model, last.conversation_id))


def conversation_position(query: list[str], token: str) -> Position | None:
    """Where the page begins; None for the first page.

    Raises:
        InvalidFieldError: the token was not made by this query.
    """
    if not token:
        return None
    made = _decode(token, _ConversationToken)
    _check_query(made.query, query)
    return Position(made.commit_time_us, made.model, made.conversation_id)


def worker_token(query: list[str], last_worker_id: str) -> str:
    """The token of the page after a worker, for the same query only."""
    return _encode(_WorkerToken(query, last_worker_id))


def worker_position(query: list[str], token: str) -> str:
    """The worker id after which the page begins; empty for the first page.

    Raises:
        InvalidFieldError: the token was not made by this query.
    """
    if not token:
        return ""
    made = _decode(token, _WorkerToken)
    _check_query(made.query, query)
    return made.worker_id


def pin_token(query: list[str], last: PinPosition) -> str:
    """The token of the page after `last`, for the same query only."""
    key = last.key
    return _encode(
        _PinToken(
            query,
            last.worker_id,
            last.commit_time_us,
            key.tenant,
            key.model,
            key.conversation_id,
        )
    )


def pin_position(query: list[str], token: str) -> PinPosition | None:
    """Where the page begins; None for the first page.

    Raises:
        InvalidFieldError: the token was not made by this query.
    """
    if not token:
        return None
    made = _decode(token, _PinToken)
    _check_query(made.query, query)
    key = ConversationKey(made.tenant, made.model, made.conversation_id)
    return PinPosition(made.worker_id, made.commit_time_us, key)


def _encode(token: msgspec.Struct) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(token)).decode()


def _decode(token: str, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(base64.urlsafe_b64decode(token.encode()), type=kind)
    except (binascii.Error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid() from error


def _check_query(made_by: list[str], query: list[str]) -> None:
    if made_by != query:
        raise _invalid()


def _invalid() -> InvalidFieldError:
    return InvalidFieldError(
        "page_token is not a token of this query; start from the first page", field="page_token"
    )
