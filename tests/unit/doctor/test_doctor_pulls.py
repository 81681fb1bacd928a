"""What the prefill engine's counts say of a probe's pulls."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop.bench.transfers import Transfers
from kvloop.doctor.examine import examine
from kvloop.doctor.facts import Facts, Probe, ProbeRound
from kvloop.doctor.findings import Severity
from kvloop.doctor.report import as_json, as_text
from tests.unit.doctor.cases import decode, prefill, receipt, stack


def _facts(pulls: Transfers | None, **traits: Any) -> Facts:
    probe = Probe((ProbeRound(receipt(), receipt()),), receipt(), pulls)
    return stack(prefill(**traits), decode(**traits), probe=probe)


def _found(pulls: Transfers | None, **traits: Any) -> list[str]:
    found = examine(_facts(pulls, **traits))
    return [each.check for each in found if each.check.startswith("pull_")]


# Three pulls of 4,500 tokens each.
SMALL_PIECES = Transfers(3, 3 * 660e6, 3 * 0.075, 3 * 0.060, 3 * 20_232.0)
TCP = Transfers(3, 3 * 660e6, 3 * 1.8, 3 * 0.002, 3 * 282.0)
GOOD = Transfers(3, 3 * 660e6, 3 * 0.0025, 3 * 0.001, 3 * 282.0)


@pytest.mark.parametrize(
    ("pulls", "checks"),
    [(SMALL_PIECES, ["pull_pieces"]), (TCP, ["pull_transport"]), (GOOD, []), (None, [])],
)
def test_pieces_and_rate_name_what_holds_a_pull_back(
    pulls: Transfers | None, checks: list[str]
) -> None:
    assert _found(pulls) == checks


def test_a_probe_that_pulled_nothing_says_nothing_of_pulls() -> None:
    assert _found(Transfers()) == []


def test_cpu_engines_are_not_judged_by_a_gpus_measure() -> None:
    assert _found(TCP, kv_buffer_device="cpu") == []


def test_what_is_found_names_pieces_time_and_remedy() -> None:
    (pieces,) = [each for each in examine(_facts(SMALL_PIECES)) if each.check == "pull_pieces"]
    assert "20,232 pieces of 32 KiB in 75.0 ms (8.8 GB/s), 60.0 ms of it to post" in pieces.what
    assert "68.8 ms" in pieces.what
    assert "--kv-layout auto" in pieces.fix
    (tcp,) = [each for each in examine(_facts(TCP)) if each.check == "pull_transport"]
    assert tcp.severity is Severity.WRONG
    assert "CUDA_VISIBLE_DEVICES" in tcp.fix


def test_the_report_tells_the_counts() -> None:
    facts = _facts(GOOD)
    assert "each pull moved 660.0 MB in 282 pieces" in as_text(facts, [])
    assert '"descriptors": 846.0' in as_json(facts, [])
