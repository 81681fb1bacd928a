"""What is seen in a stream chunk, and that it passes unchanged."""

from __future__ import annotations

import json

import pytest

from kvloop.errors import InternalError, InvalidFieldError
from services.worker.chunks import Usage, read_chunk
from tests.unit.worker.fake_vllm import chunk, error_body, usage_chunk

PLAIN = chunk("hi")
LAST = chunk("", "stop")


@pytest.mark.parametrize(
    ("payload", "ends"),
    [
        (PLAIN, False),
        (LAST, True),
        (b'{"choices":[{"finish_reason": "length"}]}', True),
        (b'{"choices":[{"finish_reason": null}]}', False),
        (b'{"choices":[{"finish_reason":null},{"finish_reason":"stop"}]}', True),
        (b'{"choices":[{"index":0,"delta":{}}]}', False),
        (b'{"choices":[{"delta":{"content":"\\"finish_reason\\":\\"stop\\""}}]}', False),
        (b'{"choices":[{"delta":{"finish_reason":"x"},"finish_reason":null}]}', False),
        (b'not json with "finish_reason":1', False),
    ],
)
def test_the_end_of_the_answer_is_recognised(payload: bytes, ends: bool) -> None:
    seen = read_chunk(payload)
    assert seen.ends_answer is ends
    assert seen.json == payload


def test_usage_is_read_from_the_chunk_that_carries_only_it() -> None:
    seen = read_chunk(usage_chunk(11, 3))
    assert seen.usage == Usage(11, 3)
    assert seen.only_usage


def test_usage_beside_a_part_of_the_answer_is_read_too() -> None:
    payload = b'{"choices":[{"finish_reason":null}],"usage":{"prompt_tokens":4}}'
    seen = read_chunk(payload)
    assert seen.usage == Usage(4, 0)
    assert not seen.only_usage


def test_a_chunk_with_null_usage_has_none() -> None:
    assert read_chunk(b'{"choices":[],"usage":null}').usage is None


def test_transfer_params_are_removed_and_nothing_else() -> None:
    payload = (
        b'{"id":"x", "choices":[{"finish_reason":"stop","a":1.0, "b":[1, 2]}],'
        b'"kv_transfer_params":{"remote_host":"10.0.0.1"},"usage":null}'
    )
    seen = read_chunk(payload)
    assert b"remote_host" not in seen.json
    assert b'[{"finish_reason":"stop","a":1.0, "b":[1, 2]}]' in seen.json
    assert json.loads(seen.json) == {
        key: value for key, value in json.loads(payload).items() if key != "kv_transfer_params"
    }
    assert seen.ends_answer


def test_text_that_speaks_of_transfer_params_is_left_alone() -> None:
    payload = b'{"choices":[{"delta":{"content":"\\"kv_transfer_params\\": 1"}}]}'
    assert read_chunk(payload).json == payload
    nested = b'{"choices":[{"delta":{"kv_transfer_params":1}}]}'
    assert read_chunk(nested).json == nested


@pytest.mark.parametrize(
    ("code", "kind"), [(500, InternalError), (400, InvalidFieldError), (None, InternalError)]
)
def test_an_error_event_is_raised_with_its_class(code: int | None, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="went wrong"):
        read_chunk(error_body("went wrong", code or 0))


def test_text_that_speaks_of_errors_is_no_error() -> None:
    payload = b'{"choices":[{"delta":{"content":"x","error":"y"},"finish_reason":null}]}'
    assert read_chunk(payload).json == payload
