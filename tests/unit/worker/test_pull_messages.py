"""What is known of pulls, in the words of the protos."""

from __future__ import annotations

import pytest

from kvloop.common.v1 import common_pb2
from kvloop.durations import to_seconds
from services.worker.event_messages import EngineRef
from services.worker.handoff import PrefillReport
from services.worker.pull_costs import Link
from services.worker.pull_messages import (
    link_estimate,
    prefill_report,
    pull_estimate,
    tokens_per_second,
)
from services.worker.pull_plan import PullPlan, RecomputeCost


def test_a_report_tells_what_was_expected_and_what_came() -> None:
    report = prefill_report(PrefillReport(100, 64, 60, 4, 36, None, 0.5, 0.25, 2.0))
    assert report.pulled_tokens == 60
    assert to_seconds(report.pull_duration) == 0.5
    assert to_seconds(report.expected_pull) == 0.25
    assert to_seconds(report.expected_recompute) == 2.0


def test_what_is_unknown_is_absent() -> None:
    report = prefill_report(PrefillReport(100, recomputed_tokens=100))
    for name in ("pull_duration", "expected_pull", "expected_recompute"):
        assert not report.HasField(name)
    answer = pull_estimate(PullPlan(5, None, None, "why"))
    assert not answer.HasField("pull")
    assert not answer.HasField("recompute")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SLOWER_THAN_RECOMPUTE", common_pb2.MISS_REASON_SLOWER_THAN_RECOMPUTE),
        (None, common_pb2.MISS_REASON_UNSPECIFIED),
        ("SOMETHING_NEW", common_pb2.MISS_REASON_UNSPECIFIED),
    ],
)
def test_miss_reasons_are_translated_and_unknown_ones_dropped(
    name: str | None, reason: common_pb2.MissReason.ValueType
) -> None:
    assert prefill_report(PrefillReport(miss_reason=name)).miss_reason == reason


def test_a_link_is_told_with_its_engine() -> None:
    told = link_estimate(Link(EngineRef("e", "1"), 3, 2e5, 3e10, 0.004, True))
    assert (told.engine.engine_id, told.engine.epoch) == ("e", "1")
    assert (told.samples, told.bytes_per_second, told.held_back) == (3, 3e10, True)
    assert to_seconds(told.latency) == 0.004


@pytest.mark.parametrize(
    ("cost", "rate"),
    [(None, 0.0), (RecomputeCost(0.0, 2.0), 1 / 1024), (RecomputeCost(0.001, 0.0), 1000.0)],
)
def test_the_rate_of_computing(cost: RecomputeCost | None, rate: float) -> None:
    assert tokens_per_second(cost) == pytest.approx(rate)
