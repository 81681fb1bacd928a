"""`kvloop pins` against a kvmeta and a worker of given contents."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from google.protobuf.duration_pb2 import Duration

from kvloop.cli.pins import memory
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.worker.v1 import worker_pb2
from tests.unit.cli.fake_kvmeta import FakeKvmeta

Run = Callable[..., int]
AVAILABLE = ledger_pb2.Conversation.STATE_AVAILABLE
TAKEN = ledger_pb2.Conversation.STATE_TAKEN


def _pin(name: str, state: ledger_pb2.Conversation.State.ValueType = AVAILABLE) -> ledger_pb2.Pin:
    return ledger_pb2.Pin(
        conversation=ledger_pb2.Conversation(
            key=common_pb2.ConversationKey(tenant="acme", model="tiny", conversation_id=name),
            state=state,
            worker_id="decode-0",
            num_tokens=1234,
            num_blocks=39,
            remaining_ttl=Duration(seconds=430),
        ),
        age=Duration(seconds=50),
        engine_remaining=Duration(seconds=41),
        num_bytes=39 * 64 * 1024,
    )


def _worker(
    name: str, address: str, role: common_pb2.WorkerRole.ValueType
) -> registry_pb2.WorkerEntry:
    return registry_pb2.WorkerEntry(
        worker=registry_pb2.Worker(
            worker_id=name,
            role=role,
            address=address,
            traits=registry_pb2.EngineTraits(num_kv_blocks=1000, kv_block_bytes=64 * 1024),
        )
    )


@pytest.fixture
def stack(kvmeta: FakeKvmeta) -> FakeKvmeta:
    """Two pins, one of them being read, and an orphan, on the one decode worker."""
    kvmeta.pins = [_pin("a"), _pin("b", TAKEN)]
    kvmeta.workers = [
        _worker("decode-0", kvmeta.address, common_pb2.WORKER_ROLE_DECODE),
        _worker("prefill-0", "127.0.0.1:1", common_pb2.WORKER_ROLE_PREFILL),
    ]
    kvmeta.info = worker_pb2.GetWorkerInfoResponse(
        retained_pins=3, retained_blocks=100, orphan_pins=1
    )
    return kvmeta


def _tables(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("stack")
def test_pins_of_all_pages_and_what_each_worker_retains(kvloop: Run, capsys) -> None:
    assert kvloop("pins") == 0
    header, a, b, summary, decode = _tables(capsys)
    assert header[:4] == ["worker", "tenant", "model", "conversation"]
    assert a == [
        *("decode-0", "acme", "tiny", "a", "available", "1,234", "39", "2.4 MiB"),
        *("50 s", "430 s", "41 s"),
    ]
    assert b[3:5] == ["b", "taken"]
    assert b[-2] == "-"
    assert summary == ["worker", "pins", "blocks", "memory", "share", "orphans"]
    assert decode == ["decode-0", "3", "100", "6.2 MiB", "10%", "1"]


def test_filters_go_to_the_ledger(stack: FakeKvmeta, kvloop: Run, capsys) -> None:
    assert kvloop("pins", "--worker", "decode-9", "--tenant", "acme", "--model", "tiny") == 0
    asked = stack.asked_for[0]
    assert (asked.worker_id, asked.tenant, asked.model) == ("decode-9", "acme", "tiny")
    assert _tables(capsys)[-1][0] == "worker"  # no worker of that name


@pytest.mark.usefixtures("stack")
def test_json_has_every_pin_and_every_worker(kvloop: Run, capsys) -> None:
    assert kvloop("pins", "--json") == 0
    a, b, worker = map(json.loads, capsys.readouterr().out.splitlines())
    assert a["conversation"]["key"]["conversation_id"] == "a"
    assert a["engine_remaining"] == "41s"
    assert b["conversation"]["state"] == "STATE_TAKEN"
    assert worker == {
        "worker_id": "decode-0",
        "retained_pins": 3,
        "retained_blocks": 100,
        "orphan_pins": 1,
    }


def test_a_worker_that_cannot_be_asked_hides_nothing_else(
    stack: FakeKvmeta, kvloop: Run, capsys
) -> None:
    stack.workers = [_worker("decode-0", "127.0.0.1:1", common_pb2.WORKER_ROLE_DECODE)]
    assert kvloop("pins") == 0
    *_, worker = _tables(capsys)
    assert worker[:2] == ["decode-0", "-"]
    assert worker[-1].startswith("unknown: ")
    assert kvloop("pins", "--json") == 0
    assert "error" in json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "-"),
        (1, "1.0 B"),
        (1023, "1,023.0 B"),
        (65536, "64.0 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**53, "8,192.0 TiB"),
    ],
)
def test_sizes_are_told_for_people(size: int, text: str) -> None:
    assert memory(size) == text
