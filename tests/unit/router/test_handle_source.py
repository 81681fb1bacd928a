"""Where transfer params lead, compared with what the holder has registered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvloop.kvmeta.v1 import registry_pb2
from services.router.handle_source import foreign_source


def _holder(host: str = "10.0.0.7") -> registry_pb2.Worker:
    worker = registry_pb2.Worker(worker_id="decode-0")
    worker.engine.engine_id = "engine-1"
    worker.traits.side_channel_host = host
    worker.traits.side_channel_port = 5700
    return worker


def _params(**changes: Any) -> bytes:
    fields = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "engine-1",
        "remote_request_id": "r",
        "remote_host": "10.0.0.7",
        "remote_port": 5700,
        "remote_blocks_expiry_time": 12.5,
        "kvloop_proof": {"digests": "00"},
    }
    return json.dumps(fields | changes).encode()


def test_params_of_the_holder_lead_to_it() -> None:
    assert foreign_source(_params(), _holder()) is None


def test_E3_a_bare_ipv6_address_is_compared_as_it_is() -> None:
    assert foreign_source(_params(remote_host="fd00::1"), _holder("fd00::1")) is None
    assert foreign_source(_params(remote_host="[fd00::1]"), _holder("fd00::1")) == "remote_host"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("remote_engine_id", "engine-2"),
        ("remote_host", "10.0.0.8"),
        ("remote_host", ""),
        ("remote_host", "10.0.0.7.example.org"),
        ("remote_port", 5701),
        ("remote_port", 0),
    ],
)
def test_another_engine_or_address_is_named(part: str, value: object) -> None:
    assert foreign_source(_params(**{part: value}), _holder()) == part


def test_what_is_absent_leads_nowhere() -> None:
    assert foreign_source(b'{"remote_request_id":"r","remote_host":null}', _holder()) is None


@pytest.mark.parametrize(
    "params",
    [b"", b"[]", b"{", b'{"remote_port":"5700"}', b'{"remote_host":["10.0.0.7","10.6.6.6"]}'],
)
def test_params_of_another_form_are_not_let_through(params: bytes) -> None:
    assert foreign_source(params, _holder()) == "form"


def test_of_a_member_that_is_there_twice_the_one_counts_that_engines_take() -> None:
    twice = _params()[:-1] + b',"remote_host":"10.6.6.6"}'
    assert json.loads(twice)["remote_host"] == "10.6.6.6"
    assert foreign_source(twice, _holder()) == "remote_host"
