"""Checks of services and workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvloop.common.v1 import common_pb2
from kvloop.doctor.examine import examine
from kvloop.doctor.facts import PREFILL, Service, WorkerFacts
from kvloop.doctor.findings import Severity
from kvloop.doctor.workers import (
    check_pairs,
    check_services,
    check_side_channels,
    check_versions,
    check_workers,
)
from kvloop.kvmeta.v1 import registry_pb2
from tests.unit.doctor.cases import decode, found, prefill, stack, worker


def test_a_stack_in_good_order_gives_no_findings() -> None:
    assert examine(stack()) == []


@pytest.mark.parametrize("name", ["router", "kvmeta"])
def test_a_service_that_does_not_answer_is_wrong(name: str) -> None:
    facts = stack(**{name: Service("host:1", "connection refused")})
    finding = found(check_services, facts)["service_unreachable"]
    assert finding.severity is Severity.WRONG
    assert finding.subject == f"{name} host:1"
    assert "connection refused" in finding.what


def test_a_router_that_knows_another_kvmeta_is_found() -> None:
    finding = found(check_services, stack(models=()))["router_sees_no_workers"]
    assert "qwen" in finding.what
    assert "kvmeta:7200" in finding.fix


def test_a_router_need_not_serve_a_model_without_both_roles() -> None:
    assert found(check_services, stack(prefill(), models=())) == {}


def test_a_sidecar_that_does_not_answer_is_wrong() -> None:
    silent = WorkerFacts(worker("prefill-0", PREFILL), trouble="deadline")
    finding = found(check_workers, stack(silent, decode()))["worker_unreachable"]
    assert "10.0.0.1:7300" in finding.what
    assert "--advertise" in finding.fix


def test_a_worker_without_a_lease_is_wrong() -> None:
    facts = stack(prefill(), decode(info={"registered": False}))
    assert found(check_workers, facts)["worker_unregistered"].subject == "decode-0"


def test_a_sidecar_that_should_be_listed_and_is_not_is_wrong() -> None:
    missing = replace(decode("decode-1"), listed=False)
    facts = stack(prefill(), decode(), missing)
    assert found(check_workers, facts)["worker_unregistered"].subject == "decode-1"


def test_a_sidecar_that_neither_answers_nor_is_listed_is_named_by_its_address() -> None:
    nobody = WorkerFacts(registry_pb2.Worker(address="h:1"), trouble="refused", listed=False)
    facts = stack(prefill(), decode(), nobody)
    assert found(check_workers, facts)["worker_unreachable"].subject == "h:1"


def test_a_restarted_engine_and_a_draining_worker_are_worth_knowing() -> None:
    now = worker("decode-0", common_pb2.WORKER_ROLE_DECODE)
    now.engine.epoch = "2"
    now.state = registry_pb2.Worker.STATE_DRAINING
    findings = found(check_workers, stack(prefill(), decode(info={"worker": now})))
    assert set(findings) == {"worker_restarted", "worker_draining"}
    assert {each.severity for each in findings.values()} == {Severity.ADVICE}


def test_a_model_needs_both_roles() -> None:
    assert "prefill" in found(check_workers, stack(decode()))["role_missing"].what
    assert "decode" in found(check_workers, stack(prefill()))["role_missing"].what


def test_a_registry_without_workers_is_wrong() -> None:
    facts = replace(stack(), workers=())
    assert set(found(check_workers, facts)) == {"no_workers"}


def test_an_engine_without_our_connector_is_wrong() -> None:
    facts = stack(prefill(kv_connector="NixlConnector"), decode())
    finding = found(check_versions, facts)["connector_missing"]
    assert "NixlConnector" in finding.what
    assert "kv_connector_module_path" in finding.fix


@pytest.mark.parametrize(
    ("trait", "check"),
    [("vllm_version", "vllm_versions_differ"), ("nixl_version", "nixl_versions_differ")],
)
def test_mixed_versions_are_worth_knowing(trait: str, check: str) -> None:
    facts = stack(prefill(**{trait: "0.1"}), decode())
    finding = found(check_versions, facts)[check]
    assert finding.severity is Severity.ADVICE
    assert "0.1: prefill-0" in finding.what


@pytest.mark.parametrize(
    ("change", "words", "fix"),
    [
        ({"block_size": 32}, "block sizes differ", "--block-size"),
        ({"kv_cache_dtype": "fp8"}, "element types differ", "--kv-cache-dtype"),
    ],
)
def test_pairs_that_cannot_hand_over_say_why(change: dict[str, Any], words: str, fix: str) -> None:
    finding = found(check_pairs, stack(prefill(), decode(**change)))["cannot_hand_over"]
    assert finding.subject == "prefill-0 and decode-0"
    assert words in finding.what
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"contract_version": 2}, "versions of the handle format"),
        ({"tensor_parallel_size": 2}, "tensor parallel"),
        ({"bidirectional_kv_xfer": False}, "bidirectional_kv_xfer is off on the decode"),
    ],
)
def test_pairs_that_cannot_pull_say_why(change: dict[str, Any], words: str) -> None:
    finding = found(check_pairs, stack(prefill(), decode(**change)))["cannot_pull"]
    assert words in finding.what
    assert "nothing is reused" in finding.what


def test_pairs_with_one_trouble_are_named_together() -> None:
    facts = stack(prefill(), prefill(name="prefill-1"), decode(block_size=32))
    (finding,) = check_pairs(facts)
    assert finding.subject == "prefill-0 and decode-0; prefill-1 and decode-0"


def test_a_loopback_side_channel_beside_a_public_address_is_wrong() -> None:
    facts = stack(prefill(), decode(side_channel_host="127.0.0.1"))
    finding = found(check_side_channels, facts)["loopback_side_channel"]
    assert finding.subject == "decode-0"
    assert "--side-channel-host" in finding.fix


def test_loopback_everywhere_is_one_machine_and_fine() -> None:
    local: dict[str, Any] = {"address": "127.0.0.1:7300", "side_channel_host": "localhost"}
    assert found(check_side_channels, stack(prefill(**local), decode(**local))) == {}
