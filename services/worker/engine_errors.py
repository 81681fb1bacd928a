"""What an error of the engine means, as one of kvloop's errors."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

from kvloop.errors import (
    ENGINE_BODY,
    MAX_ENGINE_BODY,
    InternalError,
    InvalidFieldError,
    KvloopError,
    ModelNotFoundError,
    UnavailableError,
    UnsupportedError,
)

_log = structlog.get_logger(__name__)

_REJECTIONS = frozenset({400, 413, 415, 422})
"""The request is at fault. Others of the 4xx speak of the sidecar's own call: a
missing key, a path that this engine does not have."""
_BUSY = frozenset({429, 503})
_NO_ENDPOINT = frozenset({404, 405, 501})
"""Unless it is about the model, the engine does not have what was asked for."""

_MAX_MESSAGE = 1024
"""Characters of the engine's message that are passed on: errors travel in
trailers, which peers bound to a few KiB."""


def from_reply(status: int, body: bytes) -> KvloopError:
    """The error in an HTTP reply with a status of 400 or above."""
    fallback = body[:_MAX_MESSAGE].decode(errors="replace")
    return _make(status, _parse(body), body, fallback=fallback)


def from_event(payload: bytes) -> KvloopError | None:
    """The error in an event of a stream, or None if it is not one.

    The HTTP status was 200 by then; the event carries the one that fits.
    """
    try:
        event = msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return None
    if not isinstance(event, dict) or "error" not in event or "choices" in event:
        return None
    error = _find(event)
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return _make(status, error, payload, fallback="the engine ended the stream with an error")


def unreachable(url: str, detail: object) -> UnavailableError:
    """The request surely never reached the engine.

    Where and why is for the log: errors go on to callers, to whom addresses are
    no business.
    """
    _log.warning("engine_unreachable", url=url, detail=str(detail))
    return UnavailableError(
        "the worker cannot reach its engine", reason="ENGINE_UNREACHABLE", reached="false"
    )


def lost(url: str, detail: str) -> UnavailableError:
    """The connection broke when the engine may have begun."""
    _log.warning("engine_lost", url=url, detail=detail)
    return UnavailableError(
        "the connection to the engine broke", reason="ENGINE_LOST", reached="true"
    )


def _make(status: int, error: dict[str, Any], body: bytes, *, fallback: str) -> KvloopError:
    found = error.get("message")
    message = (found if isinstance(found, str) and found else fallback)[:_MAX_MESSAGE]
    facts: dict[str, str | int] = {"http_status": status, "engine_message": message}
    if len(body) <= MAX_ENGINE_BODY:
        facts[ENGINE_BODY] = body.decode(errors="replace")
    if status == 404 and error.get("type") == "NotFoundError":
        return ModelNotFoundError(
            f"the engine does not serve the model: {message}",
            reason=ModelNotFoundError.default_reason,
            **facts,
        )
    if status in _NO_ENDPOINT:
        return UnsupportedError(
            "the engine that serves this model does not have this endpoint",
            reason="ENDPOINT_UNSUPPORTED",
            http_status=status,
        )
    if status in _REJECTIONS:
        if isinstance(param := error.get("param"), str):
            facts["field"] = param
        return InvalidFieldError(
            f"the engine refused the request: {message}", reason="ENGINE_REJECTED", **facts
        )
    if status in _BUSY:
        return UnavailableError(f"the engine is busy: {message}", reason="ENGINE_BUSY", **facts)
    return InternalError(f"the engine failed: {message}", reason="ENGINE_FAILED", **facts)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        return _find(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return {}


def _find(reply: object) -> dict[str, Any]:
    """The error object: `{"error": {...}}`, or flat as older vLLM wrote it."""
    if not isinstance(reply, dict):
        return {}
    error = reply.get("error", reply)
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else {}
