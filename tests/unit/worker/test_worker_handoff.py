"""What a prefill reply hands over."""

from __future__ import annotations

import pytest

from kvloop.errors import InternalError
from services.worker.handoff import MissingHandoff, PrefillReport, read_reply

PARAMS = (
    b'{"do_remote_prefill":true, "remote_block_ids":[[1, 2]],"t":1.50,"n":null,'
    b'"kvloop_report":{"prompt_tokens":100,"proven_tokens":64,"pulled_tokens":60,'
    b'"cached_tokens":4,"recomputed_tokens":36,"miss_reason":null}}'
)


def _reply(params: bytes | None) -> bytes:
    member = b"" if params is None else b'"kv_transfer_params": ' + params + b","
    return b'{"choices":[],' + member + b'"usage":{"prompt_tokens":100,"total_tokens":101}}'


def test_params_are_taken_byte_for_byte_with_the_report() -> None:
    handoff = read_reply(_reply(PARAMS))
    assert handoff.params == PARAMS
    assert handoff.missing is None
    assert handoff.reported
    assert handoff.report == PrefillReport(100, 64, 60, 4, 36, None)


def test_a_miss_reason_is_carried_by_name() -> None:
    params = b'{"kvloop_report":{"prompt_tokens":9,"miss_reason":"PREFIX_MISMATCH"}}'
    assert read_reply(_reply(params)).report.miss_reason == "PREFIX_MISMATCH"


def test_times_are_carried_and_may_be_null() -> None:
    params = (
        b'{"kvloop_report":{"prompt_tokens":9,"pull_seconds":0.25,'
        b'"expected_pull_seconds":null,"expected_recompute_seconds":1}}'
    )
    report = read_reply(_reply(params)).report
    assert report.pull_seconds == 0.25
    assert report.expected_pull_seconds is None
    assert report.expected_recompute_seconds == 1.0


@pytest.mark.parametrize(
    ("params", "missing"), [(None, MissingHandoff.ABSENT), (b"null", MissingHandoff.NULL)]
)
def test_a_missing_hand_off_is_named(params: bytes | None, missing: MissingHandoff) -> None:
    handoff = read_reply(_reply(params))
    assert handoff.params == b""
    assert handoff.missing is missing


def test_without_a_report_usage_counts_and_the_parts_add_up() -> None:
    handoff = read_reply(_reply(b'{"remote_port":1}'))
    assert not handoff.reported
    assert handoff.report == PrefillReport(prompt_tokens=100, recomputed_tokens=100)


@pytest.mark.parametrize(
    "reply", [b"", b"oops", b"[]", b'{"kv_transfer_params":[1]}', b'{"usage":3}']
)
def test_a_reply_that_cannot_be_read_is_the_engines_failure(reply: bytes) -> None:
    with pytest.raises(InternalError) as caught:
        read_reply(reply)
    assert caught.value.reason == "ENGINE_FAILED"
