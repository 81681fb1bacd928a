"""`kvloop doctor` against services with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvloop.common.v1 import common_pb2
from kvloop.doctor.facts import DECODE, PREFILL
from kvloop.durations import to_duration
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.router.v1 import router_pb2
from tests.unit.cli.fake_kvmeta import FakeKvmeta
from tests.unit.client.fake_router import FakeRouter
from tests.unit.doctor.cases import link, worker


def _worker(
    name: str, role: common_pb2.WorkerRole.ValueType, address: str
) -> registry_pb2.WorkerEntry:
    local = worker(name, role, address=address, side_channel_host="127.0.0.1")
    return registry_pb2.WorkerEntry(worker=local)


@pytest.fixture
def stack(kvmeta: FakeKvmeta, router: FakeRouter) -> FakeKvmeta:
    """One worker of each role; the fake answers for both sidecars."""
    router.models = [router_pb2.Model(name="qwen")]
    kvmeta.workers = [
        _worker("decode-0", DECODE, kvmeta.address),
        _worker("prefill-0", PREFILL, kvmeta.address),
    ]
    kvmeta.info.registered = True
    kvmeta.info.links.append(link(200.0))
    for entry in kvmeta.workers:
        entry.worker.engine.epoch = "1"
    return kvmeta


def test_a_stack_in_good_order_ends_with_status_0(
    stack: FakeKvmeta, kvloop: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    stack.workers[0].worker.engine.CopyFrom(stack.info.links[0].engine)
    assert kvloop("doctor") == 0
    out = capsys.readouterr().out
    assert "2 workers, models qwen" in out
    assert "prefill-0 <- decode-0" in out


def test_something_wrong_ends_with_status_1_and_says_what_to_change(
    stack: FakeKvmeta, kvloop: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    stack.workers[0].worker.traits.block_size = 32
    assert kvloop("doctor", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    finding = next(each for each in report["findings"] if each["check"] == "cannot_hand_over")
    assert "--block-size" in finding["fix"]
    assert not report["healthy"]


def test_services_that_are_down_are_findings_and_no_crash(
    kvloop: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    status = kvloop(
        "doctor", "--json", "--router", "127.0.0.1:1", "--kvmeta", "127.0.0.1:1",
        "--worker", "127.0.0.1:1",
    )  # fmt: skip
    assert status == 1
    report = json.loads(capsys.readouterr().out)
    assert [each["check"] for each in report["findings"]] == [
        "service_unreachable",
        "service_unreachable",
        "worker_unreachable",
    ]


def test_the_ledgers_clock_is_compared_with_ours(
    stack: FakeKvmeta, kvloop: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = ledger_pb2.Conversation(turn=1, remaining_ttl=to_duration(100))
    conversation.expire_time.FromSeconds(1_000_000)
    stack.conversations = [conversation]
    kvloop("doctor", "--json")
    checks = [each["check"] for each in json.loads(capsys.readouterr().out)["findings"]]
    assert "clock" in checks


def test_a_probe_takes_its_turns_through_the_router(
    stack: FakeKvmeta,
    router: FakeRouter,
    kvloop: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    router.result = router_pb2.TurnResult(
        receipt=router_pb2.Receipt(retain_outcome=router_pb2.RETAIN_OUTCOME_NO_EVENT)
    )
    assert kvloop("doctor", "--probe", "--probe-tokens", "64", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert "probe_not_retained" in [each["check"] for each in report["findings"]]
    turns = [each for each in router.requests if isinstance(each, router_pb2.GenerateRequest)]
    assert len(turns) == 7
    assert len(turns[0].token_ids.ids) == 64
    assert turns[0].model == "qwen"


def test_an_engine_that_cannot_be_asked_for_its_pulls_is_told(
    stack: FakeKvmeta, kvloop: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--probe", "--probe-tokens", "64", "--prefill-engine-url", "http://127.0.0.1:9"]
    assert kvloop("doctor", *asked) == 3
    assert "cannot be reached" in capsys.readouterr().err
