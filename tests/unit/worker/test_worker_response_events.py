"""What the sidecar reads in the events and replies of responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvloop.errors import InvalidFieldError
from services.worker.chunks import Usage
from services.worker.response_events import read_event, read_whole
from tests.unit.worker.fake_vllm import error_body

USAGE = {"input_tokens": 9, "output_tokens": 4, "total_tokens": 13}


def _event(kind: str, **members: Any) -> bytes:
    return json.dumps({**members, "type": kind}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("payload", "ends"),
    [
        (_event("response.created", response={"status": "in_progress", "usage": None}), False),
        (_event("response.output_text.delta", delta='say "response": {}'), False),
        (_event("response.completed", response={"usage": USAGE}), True),
        (_event("response.incomplete", response={"usage": USAGE}), True),
        (_event("response.failed", response={"error": {"code": "x"}}), True),
        (_event("error", code="x", message="y", error=None), True),
        (b'not json, though it names a "response"', False),
        (b'{"response":7}', False),
    ],
)
def test_the_last_event_is_known_and_every_event_stays_as_it_is(payload: bytes, ends: bool) -> None:
    chunk = read_event(payload)
    assert (chunk.json, chunk.ends_answer, chunk.only_usage) == (payload, ends, False)


def test_usage_is_counted_in_events_and_replies() -> None:
    assert read_event(_event("response.completed", response={"usage": USAGE})).usage == Usage(9, 4)
    assert read_whole(json.dumps({"usage": USAGE}).encode()).usage == Usage(9, 4)
    assert read_whole(b'{"usage":null}').usage is None
    assert read_whole(b"no json").usage is None


def test_only_internal_members_are_removed_wherever_they_are() -> None:
    inner = b'{"id":"r","kv_transfer_params":{"remote_port":1},"x":1.50,"ec_transfer_params":null}'
    chunk = read_event(b'{"type":"response.completed","response":' + inner + b',"n":2.0}')
    assert chunk.json == b'{"type":"response.completed","response":{"id":"r","x":1.50},"n":2.0}'
    assert chunk.ends_answer
    assert read_whole(inner).json == b'{"id":"r","x":1.50}'
    spoken = _event("response.output_text.delta", delta='"kv_transfer_params": {}')
    assert read_event(spoken).json == spoken


def test_an_error_in_the_form_of_other_endpoints_is_raised() -> None:
    with pytest.raises(InvalidFieldError):
        read_event(error_body("bad", 400))
