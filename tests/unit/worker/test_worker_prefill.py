"""The prefill leg."""

from __future__ import annotations

import msgspec
import pytest
import structlog

from kvloop.errors import InternalError, InvalidFieldError, UnavailableError
from services.worker.engine import Api
from services.worker.handoff import PrefillReport
from services.worker.metrics import WorkerMetrics
from services.worker.prefill import PrefillLeg, PrefillOrder
from tests.unit.worker.fakes import FakeEngine

HANDLE = b'{"do_remote_decode":true,"remote_block_ids":[[1]]}'
PARAMS = b'{"do_remote_prefill":true, "kvloop_report":{"prompt_tokens":9,"recomputed_tokens":9}}'
REPLY = b'{"usage":{"prompt_tokens":9},"kv_transfer_params":' + PARAMS + b"}"
FAILED = InternalError("oops", reason="ENGINE_FAILED", http_status=500)
UNREACHABLE = UnavailableError("down", reason="ENGINE_UNREACHABLE", reached="false")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics()


@pytest.fixture
def leg(engine: FakeEngine, metrics: WorkerMetrics) -> PrefillLeg:
    return PrefillLeg(engine, metrics)


def _order(body: bytes = b'{"model":"tiny","messages":[]}', handle: bytes = b"") -> PrefillOrder:
    return PrefillOrder("turn-1", Api.CHAT_COMPLETIONS, body, handle)


async def test_the_hand_off_is_passed_on_byte_for_byte(leg: PrefillLeg, engine: FakeEngine) -> None:
    engine.replies = [REPLY]
    result = await leg.run(_order())
    assert result.params == PARAMS
    assert result.report == PrefillReport(prompt_tokens=9, recomputed_tokens=9)
    assert engine.bodies[0]["max_tokens"] == 1
    assert engine.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True


async def test_the_handle_goes_to_the_engine(leg: PrefillLeg, engine: FakeEngine) -> None:
    engine.replies = [REPLY]
    await leg.run(_order(handle=HANDLE))
    assert HANDLE[1:] in engine.raw_bodies[0]


@pytest.mark.parametrize(
    ("member", "reason"), [(b"", "absent"), (b',"kv_transfer_params":null', "null")]
)
async def test_a_missing_hand_off_is_counted_by_reason(
    leg: PrefillLeg, engine: FakeEngine, metrics: WorkerMetrics, member: bytes, reason: str
) -> None:
    engine.replies = [b'{"usage":{"prompt_tokens":9}' + member + b"}"]
    result = await leg.run(_order())
    assert result.params == b""
    count = metrics.registry.get_sample_value(
        "kvloop_worker_handoffs_missing_total", {"api": "chat_completions", "reason": reason}
    )
    assert count == 1


async def test_a_connector_that_is_not_loaded_is_reported_once(
    leg: PrefillLeg, engine: FakeEngine, metrics: WorkerMetrics
) -> None:
    engine.replies = [b'{"usage":{"prompt_tokens":9},"kv_transfer_params":{"remote_port":1}}'] * 3
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await leg.run(_order())
    assert [entry["event"] for entry in logs].count("prefill_report_missing") == 1
    assert metrics.registry.get_sample_value("kvloop_worker_reports_missing_total") == 3


async def test_an_engine_that_fails_with_the_handle_is_asked_again_without(
    leg: PrefillLeg, engine: FakeEngine, metrics: WorkerMetrics
) -> None:
    engine.replies = [FAILED, REPLY]
    result = await leg.run(_order(handle=HANDLE))
    assert result.params == PARAMS
    assert result.report.miss_reason == "PULL_FAILED"
    assert "remote_block_ids" in engine.bodies[0]["kv_transfer_params"]
    assert engine.bodies[1]["kv_transfer_params"]["remote_block_ids"] is None
    assert metrics.registry.get_sample_value("kvloop_worker_handles_dropped_total") == 1


@pytest.mark.parametrize("second", [UNREACHABLE, InvalidFieldError("bad")])
async def test_a_second_failure_never_says_that_the_handle_is_unused(
    leg: PrefillLeg, engine: FakeEngine, second: Exception
) -> None:
    engine.replies = [FAILED, second]
    with pytest.raises(InternalError) as caught:
        await leg.run(_order(handle=HANDLE))
    assert caught.value is FAILED


async def test_without_a_handle_there_is_nothing_to_repeat(
    leg: PrefillLeg, engine: FakeEngine
) -> None:
    engine.replies = [FAILED, REPLY]
    with pytest.raises(InternalError):
        await leg.run(_order())
    assert len(engine.bodies) == 1


@pytest.mark.parametrize(
    "failure",
    [UNREACHABLE, UnavailableError("cut", reason="ENGINE_LOST"), InvalidFieldError("bad")],
)
async def test_other_failures_are_the_routers_to_judge(
    leg: PrefillLeg, engine: FakeEngine, failure: Exception
) -> None:
    engine.replies = [failure, REPLY]
    with pytest.raises(type(failure)) as caught:
        await leg.run(_order(handle=HANDLE))
    assert caught.value is failure
    assert len(engine.bodies) == 1


async def test_what_cannot_run_in_two_legs_never_reaches_the_engine(
    leg: PrefillLeg, engine: FakeEngine
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await leg.run(_order(b'{"n":2}'))
    assert (caught.value.reason, caught.value.field) == ("NOT_SPLITTABLE", "n")
    assert engine.bodies == []


async def test_no_prompt_and_no_params_appear_in_logs(leg: PrefillLeg, engine: FakeEngine) -> None:
    engine.replies = [FAILED, b'{"usage":{"prompt_tokens":9}}']
    with structlog.testing.capture_logs() as logs:
        await leg.run(_order(b'{"messages":[{"content":"SECRET"}]}', b'{"remote_host":"SECRET"}'))
    assert logs
    assert b"SECRET" not in msgspec.json.encode([str(entry) for entry in logs])
