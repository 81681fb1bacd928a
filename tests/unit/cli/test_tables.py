"""`kvloop conversations` and `kvloop workers` against a kvmeta of given contents."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from google.protobuf.duration_pb2 import Duration

from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from tests.unit.cli.fake_kvmeta import FakeKvmeta

Run = Callable[..., int]


def _conversation(name: str) -> ledger_pb2.Conversation:
    return ledger_pb2.Conversation(
        key=common_pb2.ConversationKey(tenant="default", model="tiny", conversation_id=name),
        state=ledger_pb2.Conversation.STATE_AVAILABLE,
        turn=3,
        worker_id="decode-0",
        num_tokens=1234,
        num_blocks=39,
        remaining_ttl=Duration(seconds=61),
    )


def _worker(name: str, role: common_pb2.WorkerRole.ValueType) -> registry_pb2.WorkerEntry:
    return registry_pb2.WorkerEntry(
        worker=registry_pb2.Worker(
            worker_id=name,
            role=role,
            address="127.0.0.1:7400",
            model="tiny",
            state=registry_pb2.Worker.STATE_ACTIVE,
            traits=registry_pb2.EngineTraits(
                vllm_version="0.32.0", block_size=32, num_kv_blocks=100
            ),
        ),
        retained_conversations=2,
        retained_blocks=25,
    )


def test_conversations_of_all_pages_as_plain_lines(kvmeta: FakeKvmeta, kvloop: Run, capsys) -> None:
    kvmeta.conversations = [_conversation("a"), _conversation("b"), _conversation("c")]
    assert kvloop("conversations") == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split("\t")[:3] == ["conversation", "model", "state"]
    assert [line.split("\t")[0] for line in lines] == ["a", "b", "c"]
    assert lines[0] == "a\ttiny\tavailable\t3\tdecode-0\t1,234\t39\t61 s"


def test_workers_show_what_they_retain(kvmeta: FakeKvmeta, kvloop: Run, capsys) -> None:
    kvmeta.workers = [
        _worker("decode-0", common_pb2.WORKER_ROLE_DECODE),
        _worker("prefill-0", common_pb2.WORKER_ROLE_PREFILL),
    ]
    assert kvloop("workers") == 0
    _, decode, prefill = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert decode[:3] == ["decode-0", "decode", "active"]
    assert decode[-1] == "2 conversations, 25 blocks (25%)"
    assert prefill[-2:] == ["-", "-"]


def test_workers_say_for_how_long_they_keep_what_they_retain(
    kvmeta: FakeKvmeta, kvloop: Run, capsys
) -> None:
    renews, fixed = (_worker(name, common_pb2.WORKER_ROLE_DECODE) for name in ("d-0", "d-1"))
    renews.worker.traits.lease_renewal = True
    renews.worker.traits.pin_lease.seconds = 60
    fixed.worker.traits.vllm_version = "0.21.0"
    for entry in (renews, fixed):
        entry.worker.traits.decoder_kv_blocks_ttl.seconds = 480
    kvmeta.workers = [renews, fixed]
    assert kvloop("workers") == 0
    _, *lines = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    leases = [line[-2] for line in lines]
    assert leases == ["60 s, renewed", "480 s fixed: vLLM 0.21.0 has no renewal"]


def test_json_has_every_field(kvmeta: FakeKvmeta, kvloop: Run, capsys) -> None:
    kvmeta.conversations = [_conversation("a")]
    assert kvloop("conversations", "--json") == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["key"]["conversation_id"] == "a"
    assert entry["remaining_ttl"] == "61s"


def test_tables_on_a_terminal(
    kvmeta: FakeKvmeta, kvloop: Run, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    assert kvloop("conversations") == 0
    assert "no conversations" in capsys.readouterr().out
    kvmeta.conversations = [_conversation("a")]
    assert kvloop("conversations") == 0
    assert "1,234" in capsys.readouterr().out


def test_unreachable_kvmeta_is_told_in_words(kvloop: Run, capsys) -> None:
    assert kvloop("workers", "--kvmeta", "127.0.0.1:1") == 3
    assert "cannot reach" in capsys.readouterr().err
