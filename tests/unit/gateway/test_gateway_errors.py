"""What HTTP clients get for an error."""

from __future__ import annotations

import json

import pytest

from kvloop.errors import (
    ConflictError,
    DeadlineError,
    InternalError,
    InvalidFieldError,
    KvloopError,
    LimitError,
    ModelNotFoundError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
    to_status,
)
from services.router.gateway.errors import TooLargeError, to_reply
from services.router.gateway.sse import event


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidFieldError("x"), 400, "BadRequestError"),
        (UnauthenticatedError("x"), 401, "AuthenticationError"),
        (ModelNotFoundError("x"), 404, "NotFoundError"),
        (ConflictError("x"), 409, "ConflictError"),
        (TooLargeError("x"), 413, "RequestTooLargeError"),
        (LimitError("x"), 429, "RateLimitError"),
        (InternalError("x"), 500, "InternalServerError"),
        (KvloopError("x"), 500, "InternalServerError"),
        (UnsupportedError("x"), 501, "NotImplementedError"),
        (UnavailableError("x"), 503, "ServiceUnavailableError"),
        (DeadlineError("x"), 504, "TimeoutError"),
    ],
)
def test_errors_have_a_status_and_an_openai_body(
    error: KvloopError, status: int, kind: str
) -> None:
    reply = to_reply(error)
    assert reply.status == status
    assert json.loads(reply.body) == {
        "error": {"message": "x", "type": kind, "param": None, "code": status}
    }


def test_the_field_at_fault_is_the_param() -> None:
    reply = to_reply(InvalidFieldError("x", field="messages[0].role"))
    assert json.loads(reply.body)["error"]["param"] == "messages[0].role"


def test_an_engines_error_is_its_status_and_its_body() -> None:
    body = '{"error": {"message":"你好"} }'
    reply = to_reply(InternalError("x", http_status=503, engine_body=body))
    assert (reply.status, reply.body.decode()) == (503, body)


def test_an_engines_error_whose_body_was_too_long_keeps_status_and_message() -> None:
    reply = to_reply(InvalidFieldError("x", http_status=422, engine_message="why", field="f"))
    assert reply.status == 422
    assert json.loads(reply.body)["error"] == {
        "message": "why",
        "type": "BadRequestError",
        "param": "f",
        "code": 422,
    }


@pytest.mark.parametrize("status", ["", "nonsense", "200", "999", "-1"])
def test_a_status_that_is_none_is_ignored(status: str) -> None:
    assert to_reply(UnavailableError("x", http_status=status)).status == 503


def test_an_engines_body_survives_the_hop_and_other_metadata_is_cut() -> None:
    error = InvalidFieldError("x", engine_body="b" * 16_384, other="o" * 5000)
    info = to_status(error).details[0].value
    assert b"b" * 16_384 in info
    assert b"o" * 1024 in info
    assert b"o" * 1025 not in info


def test_data_with_line_breaks_stays_one_event() -> None:
    assert event(b"a\nb") == b"data: a\ndata: b\n\n"
