"""What the engine's errors become."""

from __future__ import annotations

import pytest

from kvloop.errors import (
    InternalError,
    InvalidFieldError,
    KvloopError,
    ModelNotFoundError,
    UnavailableError,
    UnsupportedError,
)
from services.worker.engine_errors import from_event, from_reply
from tests.unit.worker.fake_vllm import chunk, error_body


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"),
    [
        (400, error_body("bad", 400), InvalidFieldError, "ENGINE_REJECTED"),
        (422, error_body("bad", 422), InvalidFieldError, "ENGINE_REJECTED"),
        (413, b"too large", InvalidFieldError, "ENGINE_REJECTED"),
        (404, error_body("no", 404, "NotFoundError"), ModelNotFoundError, "MODEL_NOT_FOUND"),
        (404, b'{"detail":"Not Found"}', UnsupportedError, "ENDPOINT_UNSUPPORTED"),
        (405, b'{"detail":"Method Not Allowed"}', UnsupportedError, "ENDPOINT_UNSUPPORTED"),
        (501, error_body("not supported", 501), UnsupportedError, "ENDPOINT_UNSUPPORTED"),
        (500, error_body("oops", 500), InternalError, "ENGINE_FAILED"),
        (503, b"", UnavailableError, "ENGINE_BUSY"),
        (429, b"", UnavailableError, "ENGINE_BUSY"),
        (401, error_body("no key", 401), InternalError, "ENGINE_FAILED"),
        (400, b'{"object":"error","message":"flat"}', InvalidFieldError, "ENGINE_REJECTED"),
        (400, b'{"error":"text"}', InvalidFieldError, "ENGINE_REJECTED"),
        (400, b"[1]", InvalidFieldError, "ENGINE_REJECTED"),
    ],
)
def test_status_decides_the_class(
    status: int, body: bytes, kind: type[KvloopError], reason: str
) -> None:
    error = from_reply(status, body)
    assert type(error) is kind
    assert error.reason == reason
    assert error.metadata["http_status"] == str(status)


def test_the_engines_message_and_field_are_passed_on() -> None:
    error = from_reply(400, error_body("top_k is bad", 400, param="top_k"))
    assert error.metadata["engine_message"] == "top_k is bad"
    assert error.metadata["field"] == "top_k"
    assert "top_k is bad" in error.message


@pytest.mark.parametrize("body", [error_body("x" * 5000, 400), b"y" * 5000])
def test_long_messages_are_cut_to_fit_into_trailers(body: bytes) -> None:
    error = from_reply(400, body)
    assert len(error.message) < 1100
    assert len(error.metadata["engine_message"]) == 1024


@pytest.mark.parametrize("body", [b'{"message":"flat"}', b'{"error":{"message":"m"}}'])
def test_both_shapes_of_error_bodies_are_understood(body: bytes) -> None:
    assert from_reply(400, body).metadata["engine_message"] in ("flat", "m")


def test_an_error_event_has_the_status_it_carries() -> None:
    body = error_body("too long", 400, param="prompt")
    error = from_event(body)
    assert isinstance(error, InvalidFieldError)
    assert error.metadata == {
        "http_status": "400",
        "engine_message": "too long",
        "field": "prompt",
        "engine_body": body.decode(),
    }


def test_the_engines_body_is_passed_on_whole_or_not_at_all() -> None:
    fits = error_body("x" * 10_000, 400)
    assert from_reply(400, fits).metadata["engine_body"] == fits.decode()
    assert "engine_body" not in from_reply(400, error_body("x" * 20_000, 400)).metadata


@pytest.mark.parametrize("payload", [chunk("x"), b'{"error":1,"choices":[]}', b"nonsense", b"[]"])
def test_other_events_are_no_errors(payload: bytes) -> None:
    assert from_event(payload) is None


def test_an_error_event_without_a_message_is_still_an_error() -> None:
    assert isinstance(from_event(b'{"error":null}'), InternalError)
