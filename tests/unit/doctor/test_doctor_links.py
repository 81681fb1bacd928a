"""Checks of transports, retention and probes."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop.doctor.facts import Facts, Probe, ProbeRound
from kvloop.doctor.findings import Severity
from kvloop.doctor.links import check_links
from kvloop.doctor.probing import check_probe
from kvloop.doctor.retention import check_clock, check_leases, check_retained, check_reuse
from tests.unit.doctor.cases import conversation, decode, found, link, prefill, receipt, stack


def test_a_link_that_nobody_used_is_worth_knowing() -> None:
    facts = stack(prefill(link(200.0, to="someone-else")), decode())
    finding = found(check_links, facts)["link_not_measured"]
    assert finding.severity is Severity.ADVICE
    assert finding.subject == "prefill-0 <- decode-0"


def test_tcp_on_one_host_names_what_to_set() -> None:
    facts = stack(prefill(link(0.33, held_back=True)), decode())
    finding = found(check_links, facts)["link_slower_than_recompute"]
    assert finding.severity is Severity.WRONG
    assert "0.33 GB/s" in finding.what
    assert "held back" in finding.what
    for word in ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y", "CUDA_VISIBLE_DEVICES", "UCX_TLS"):
        assert word in finding.fix


def test_tcp_between_hosts_names_the_network() -> None:
    facts = stack(prefill(link(0.33, held_back=True)), decode(side_channel_host="10.0.0.2"))
    fix = found(check_links, facts)["link_slower_than_recompute"].fix
    assert "UCX_NET_DEVICES" in fix
    assert "CUDA_IPC" not in fix


def test_a_slow_link_is_wrong_even_while_nothing_is_held_back() -> None:
    facts = stack(prefill(link(0.33)), decode())
    assert "do not pay" in found(check_links, facts)["link_slower_than_recompute"].what


def test_many_descriptors_are_told_by_the_time_of_a_block() -> None:
    """Qwen3-32B in blocks of 16: 128 descriptors of 3.4 µs each, 8.4 GB/s."""
    facts = stack(prefill(link(8.4, bytes_per_token=262_144)), decode())
    finding = found(check_links, facts)["many_descriptors"]
    assert finding.severity is Severity.ADVICE
    assert "as long as 147 descriptors" in finding.fix
    assert "blocks of 128) makes 8 times fewer" in finding.fix
    assert "cross-layers" in finding.fix


def test_a_fast_link_needs_no_advice() -> None:
    assert found(check_links, stack()) == {}


def test_cpu_engines_get_no_advice_about_gpus() -> None:
    cpu: dict[str, Any] = {"kv_buffer_device": "cpu"}
    facts = stack(prefill(link(0.33, held_back=True), **cpu), decode(**cpu))
    fix = found(check_links, facts)["link_slower_than_recompute"].fix
    assert "CPU engines" in fix
    assert "CUDA" not in fix


def test_a_long_latency_is_worth_knowing() -> None:
    facts = stack(prefill(link(200.0, latency_seconds=0.3)), decode())
    assert "300 ms" in found(check_links, facts)["link_latency"].what


def test_fixed_ttls_of_old_engines_are_worth_knowing() -> None:
    facts = stack(prefill(), decode(lease_renewal=False, vllm_version="0.21.0"))
    finding = found(check_leases, facts)["fixed_ttl"]
    assert "decode-0 (vLLM 0.21.0)" in finding.subject
    assert "480 s" in finding.what


def test_ttls_that_differ_are_worth_knowing() -> None:
    short = decode("decode-1")
    short.worker.traits.decoder_kv_blocks_ttl.FromSeconds(60)
    finding = found(check_leases, stack(prefill(), decode(), short))["ttls_differ"]
    assert "60 s: decode-1; 480 s: decode-0" in finding.what


def test_orphans_are_wrong() -> None:
    facts = stack(prefill(), decode(info={"retained_pins": 5, "orphan_pins": 2}))
    assert "2 of its 5" in found(check_retained, facts)["orphans"].what


def test_a_cache_full_of_retained_blocks_is_worth_knowing() -> None:
    facts = stack(prefill(), decode(info={"retained_blocks": 7000}))
    assert "70%" in found(check_retained, facts)["much_retained"].what


def test_conversations_that_go_on_without_a_pull_are_wrong() -> None:
    unused = prefill(link(1.0, to="someone-else"))
    facts = stack(unused, decode(), conversations=tuple(conversation(5) for _ in range(3)))
    assert "3 conversations" in found(check_reuse, facts)["nothing_pulled"].what


@pytest.mark.parametrize(
    "facts",
    [
        stack(conversations=tuple(conversation(5) for _ in range(3))),
        stack(
            prefill(link(1.0, to="x")),
            decode(),
            conversations=tuple(conversation(2) for _ in range(9)),
        ),
    ],
    ids=["something was pulled", "conversations are young"],
)
def test_otherwise_reuse_is_no_finding(facts: Facts) -> None:
    assert found(check_reuse, facts) == {}


@pytest.mark.parametrize(("offset", "words"), [(-60.0, "60 s behind"), (7.0, "7 s ahead of")])
def test_a_clock_that_is_off_is_worth_knowing(offset: float, words: str) -> None:
    finding = found(check_clock, stack(clock_offset_seconds=offset))["clock"]
    assert finding.severity is Severity.ADVICE
    assert words in finding.what


def test_a_clock_that_is_right_or_unknown_is_no_finding() -> None:
    assert found(check_clock, stack(clock_offset_seconds=2.0)) == {}
    assert found(check_clock, stack(clock_offset_seconds=None)) == {}


def probed(first: dict[str, Any] | None = None, **second: Any) -> Facts:
    round_ = ProbeRound(receipt(**(first or {})), receipt(**second))
    alone = receipt(miss_reason="REUSE_DISABLED", pulled_tokens=0, prefill_leg_seconds=0.4)
    return stack(probe=Probe((round_,), alone))


def test_a_probe_that_pulls_faster_than_computing_is_no_finding() -> None:
    assert found(check_probe, probed()) == {}
    assert found(check_probe, stack()) == {}


@pytest.mark.parametrize("outcome", ["NO_EVENT", "LEDGER_UNAVAILABLE", "NOT_PINNED", "SUPERSEDED"])
def test_a_probe_that_retains_nothing_says_why(outcome: str) -> None:
    finding = found(check_probe, probed({"retain_outcome": outcome}))["probe_not_retained"]
    assert finding.severity is Severity.WRONG
    if outcome == "NO_EVENT":
        assert "KVLOOP_EVENTS_SOCKET" in finding.fix


@pytest.mark.parametrize(
    ("reason", "severity"),
    [
        ("PULL_FAILED", Severity.WRONG),
        ("UNPROVABLE", Severity.WRONG),
        ("SOMETHING_NEW", Severity.WRONG),
        ("SLOWER_THAN_RECOMPUTE", Severity.ADVICE),
    ],
)
def test_a_probe_that_pulls_nothing_says_why(reason: str, severity: Severity) -> None:
    finding = found(check_probe, probed(pulled_tokens=0, miss_reason=reason))["probe_not_pulled"]
    assert finding.severity is severity
    assert reason.lower().replace("_", " ") in finding.what
    assert finding.fix


def test_a_probe_that_is_slower_with_a_pull_is_wrong() -> None:
    finding = found(check_probe, probed(prefill_leg_seconds=3.0))["probe_slower"]
    assert "3000 ms" in finding.what
