"""The prefill leg."""

from __future__ import annotations

import msgspec
import pytest
import structlog

from kvloop.errors import InternalError, InvalidFieldError, UnavailableError
from services.worker.engine import Api
from services.worker.event_messages import EngineRef
from services.worker.handoff import PrefillReport
from services.worker.metrics import WorkerMetrics
from services.worker.prefill import PrefillLeg, PrefillOrder
from services.worker.prefill_body import read_prefill_body
from services.worker.pull_costs import PullCosts
from tests.unit.worker.fakes import FakeClock, FakeEngine, hello
from tests.unit.worker.pull_world import DECODE, LIMITS

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
def costs(metrics: WorkerMetrics) -> PullCosts:
    return PullCosts(hello, FakeClock(), metrics, LIMITS)


@pytest.fixture
def leg(engine: FakeEngine, costs: PullCosts, metrics: WorkerMetrics) -> PrefillLeg:
    return PrefillLeg(engine, costs, metrics)


def _order(
    body: bytes = b'{"model":"tiny","messages":[]}',
    handle: bytes = b"",
    engine: EngineRef | None = DECODE,
    extension_seconds: float = 0.0,
) -> PrefillOrder:
    head = read_prefill_body(Api.CHAT_COMPLETIONS, body)
    return PrefillOrder("turn-1", Api.CHAT_COMPLETIONS, head, handle, engine, extension_seconds)


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


async def test_what_a_pull_takes_and_the_moved_deadline_go_with_the_handle(
    leg: PrefillLeg, engine: FakeEngine
) -> None:
    engine.replies = [REPLY]
    await leg.run(_order(handle=HANDLE, extension_seconds=12.5))
    params = engine.bodies[0]["kv_transfer_params"]
    assert params["kvloop_deadline_extension"] == 12.5
    assert params["kvloop_costs"]["probe_tokens"] == LIMITS.probe_tokens
    assert params["remote_block_ids"] == [[1]]


@pytest.mark.parametrize(("handle", "decode_engine"), [(b"", DECODE), (HANDLE, None)])
async def test_without_a_handle_or_its_engine_no_costs_go_along(
    leg: PrefillLeg, engine: FakeEngine, handle: bytes, decode_engine: EngineRef | None
) -> None:
    engine.replies = [REPLY]
    await leg.run(_order(handle=handle, engine=decode_engine))
    params = engine.bodies[0]["kv_transfer_params"]
    assert "kvloop_costs" not in params
    assert "kvloop_deadline_extension" not in params


async def test_legs_teach_what_pulls_take(
    leg: PrefillLeg, engine: FakeEngine, costs: PullCosts
) -> None:
    engine.replies = [
        b'{"kv_transfer_params":{"kvloop_report":{"prompt_tokens":900,"proven_tokens":800,'
        b'"pulled_tokens":800,"recomputed_tokens":100,"pull_seconds":0.5}}}'
    ]
    await leg.run(_order(handle=HANDLE))
    (link,) = costs.links()
    assert (link.engine, link.samples) == (DECODE, 1)
    assert link.tokens_per_second == pytest.approx(1600)


async def test_counts_that_are_not_the_connectors_teach_nothing(
    leg: PrefillLeg, engine: FakeEngine, costs: PullCosts
) -> None:
    engine.replies = [b'{"usage":{"prompt_tokens":900},"kv_transfer_params":{"remote_port":1}}']
    await leg.run(_order())
    assert costs.recompute is None


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
