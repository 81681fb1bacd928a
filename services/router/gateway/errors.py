"""Errors as OpenAI clients know them: an HTTP status and an `error` object."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
import msgspec

from kvloop.errors import ENGINE_BODY, RETRY_AFTER, InvalidFieldError, KvloopError, UnsupportedError

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPE = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
_RETRY_SECONDS = "1"


@dataclass(frozen=True)
class ErrorReply:
    """One error, ready to be sent."""

    status: int
    """HTTP status."""
    body: bytes
    """JSON, with the one member `error`."""
    headers: dict[str, str] = field(default_factory=dict)
    """Further headers."""


class UnreadBodyError(InvalidFieldError):
    """The request's body is not read to its end, so its connection has to close."""


class TooLargeError(UnreadBodyError):
    """The request has more bytes than are accepted."""

    default_reason = "REQUEST_TOO_LARGE"


class TooSlowError(UnreadBodyError):
    """The request's body did not come in time."""

    default_reason = "REQUEST_TOO_SLOW"


_OWN_STATUS: dict[type[KvloopError], int] = {TooLargeError: 413, TooSlowError: 408}


def to_reply(error: KvloopError) -> ErrorReply:
    """What a client gets for an error.

    An error of the engine keeps the engine's own status and body.
    """
    status = _engine_status(error)
    if status is not None and (body := error.metadata.get(ENGINE_BODY)):
        return ErrorReply(status, body.encode())
    if status is None:
        status = _OWN_STATUS.get(type(error)) or _STATUS.get(error.code, 500)
    message = error.metadata.get("engine_message") or error.message
    param = error.metadata.get("field") or None
    return ErrorReply(status, error_body(status, message, param=param), _headers(status, error))


def error_body(status: int, message: str, *, param: str | None = None) -> bytes:
    """An error as vLLM writes it."""
    kind = _TYPE.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": status}}
    )


def _engine_status(error: KvloopError) -> int | None:
    """The HTTP status with which an engine answered, or None if no engine did."""
    if isinstance(error, UnsupportedError):
        return None  # an engine's "not found" would blame the client's URL
    status = error.metadata.get("http_status", "")
    return int(status) if status.isdecimal() and 400 <= int(status) < 600 else None


def _headers(status: int, error: KvloopError) -> dict[str, str]:
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if status in (429, 503):
        return {"retry-after": error.metadata.get(RETRY_AFTER, _RETRY_SECONDS)}
    if isinstance(error, UnreadBodyError):
        return {"connection": "close"}
    return {}
