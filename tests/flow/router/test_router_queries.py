"""ListModels, ExplainRoute, health and the metrics endpoint."""

from __future__ import annotations

import asyncio
import urllib.request

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.durations import to_duration, to_seconds
from kvloop.errors import ModelNotFoundError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2
from kvloop.router.v1 import router_pb2
from kvloop.worker.v1 import worker_pb2
from services.router.breaker import BreakerState
from tests.flow.router.fakes import eventually, make_worker, waits
from tests.flow.router.stack import DECODE, PREFILL, Stack, running


async def explain(stack: Stack, conversation_id: str = "c") -> router_pb2.ExplainRouteResponse:
    request = router_pb2.ExplainRouteRequest(model="tiny", conversation_id=conversation_id)
    with rpc.typed_errors():
        return await stack.stub.ExplainRoute(request)


async def test_models_with_both_legs_are_listed_by_name() -> None:
    registered = [
        make_worker("p0", PREFILL, model="b", max_model_len=900),
        make_worker("d0", DECODE, model="b", max_model_len=1000),
        make_worker("d1", DECODE, model="b", max_model_len=1000),
        make_worker("p2", PREFILL, model="a"),
        make_worker("d2", DECODE, model="a"),
        make_worker("d3", DECODE, model="decode-only"),
    ]
    async with running(prefill=[], decode=[], registered=registered) as stack:
        listed = await stack.stub.ListModels(router_pb2.ListModelsRequest())
        assert [model.name for model in listed.models] == ["a", "b"]
        b = listed.models[1]
        assert (b.max_model_len, b.prefill_workers, b.decode_workers) == (900, 1, 2)


async def test_explanation_names_every_candidate_best_first_and_changes_nothing() -> None:
    async with running(prefill=["p0", "p1"], decode=["d0", "d1"]) as stack:
        stack.give_handle("c", "d1")
        calls = stack.worker_calls
        explained = await explain(stack)
        assert [c.worker_id for c in explained.candidates] == ["p0", "p1", "d1", "d0"]
        assert [c.chosen for c in explained.candidates] == [True, False, True, False]
        assert explained.candidates[2].reason == "holds the conversation's KV"
        assert explained.handle_available
        assert explained.miss_reason == common_pb2.MISS_REASON_UNSPECIFIED
        assert explained.retained_tokens == 100
        assert explained.remaining_ttl.ToSeconds() == 60
        assert stack.ledger.taken == []
        assert stack.worker_calls == calls  # asking for an estimate apart
        assert (await stack.chat("c")).receipt.handle_hit


async def test_explanation_tells_what_a_pull_would_take() -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        stack["p0"].estimate = worker_pb2.EstimatePullResponse(
            pull=to_duration(4.0),
            recompute=to_duration(0.25),
            pull_tokens=0,
            reason="computing is faster than pulling",
        )
        explained = await explain(stack)
        (asked,) = stack["p0"].estimates
        assert (asked.engine, asked.num_tokens) == (stack["d0"].worker.engine, 100)
        assert to_seconds(explained.expected_pull) == 4.0
        assert to_seconds(explained.expected_recompute) == 0.25
        assert explained.pull_tokens == 0
        assert explained.pull_reason == "computing is faster than pulling"


async def test_explanation_leaves_out_what_is_not_measured() -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        explained = await explain(stack)
        assert not explained.HasField("expected_pull")
        assert not explained.HasField("expected_recompute")
        assert explained.pull_reason == "not measured yet"


async def test_explanation_does_not_wait_for_a_prefill_worker_that_hangs() -> None:
    async with running(settings={"estimate_timeout_seconds": 0.05}) as stack:
        stack.give_handle("c", "d0")
        stack["p0"].estimate_steps = [waits(asyncio.Event())]
        explained = await explain(stack)
        assert explained.handle_available
        assert explained.pull_reason == "p0 did not say what it measured"


async def test_without_a_handle_nobody_is_asked_for_an_estimate() -> None:
    async with running() as stack:
        await explain(stack)
        assert stack["p0"].estimates == []


async def test_explanation_shows_load() -> None:
    async with running(prefill=["p0", "p1"]) as stack:
        gate = asyncio.Event()
        stack["p0"].prefill_steps = [waits(gate)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stack.chat("a"))
            await eventually(lambda: stack["p0"].prefills)
            explained = await explain(stack)
            gate.set()
        busy = explained.candidates[1]
        assert (busy.worker_id, busy.in_flight, busy.score) == ("p0", 1, 1.0)


@pytest.mark.parametrize("state", ["TAKEN", "SPENT", "RELEASED", "EXPIRED", "VOID"])
async def test_explanation_says_why_there_is_no_handle(state) -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        stack.ledger.row("c").state = ledger_pb2.Conversation.State.Value(f"STATE_{state}")
        explained = await explain(stack)
        assert not explained.handle_available
        assert explained.miss_reason == common_pb2.MissReason.Value(f"MISS_REASON_{state}")


async def test_explanation_of_an_unknown_conversation_and_of_none() -> None:
    async with running() as stack:
        assert (await explain(stack)).miss_reason == common_pb2.MISS_REASON_FIRST_TURN
        unnamed = await explain(stack, "")
        assert unnamed.miss_reason == common_pb2.MISS_REASON_NO_CONVERSATION


async def test_explanation_says_that_nobody_can_pull() -> None:
    async with running(traits={"p0": {"contract_version": 2}}) as stack:
        stack.give_handle("c", "d0")
        explained = await explain(stack)
        assert explained.miss_reason == common_pb2.MISS_REASON_INCOMPATIBLE
        assert "different versions" in explained.candidates[0].reason


async def test_explanation_pulls_from_no_holder_that_is_avoided() -> None:
    traits = {"p0": {"contract_version": 2}}
    settings = {"worker_cooldown_seconds": 3600}
    async with running(
        prefill=["p0", "p1"], decode=["d0", "d1"], traits=traits, settings=settings
    ) as stack:
        stack.give_handle("c", "d0")
        unreachable = UnavailableError("", reason="WORKER_UNREACHABLE")
        with pytest.raises(UnavailableError), stack.router.pool.use("d0"):
            raise unreachable
        explained = await explain(stack)
        assert explained.miss_reason == common_pb2.MISS_REASON_INCOMPATIBLE
        assert [c.worker_id for c in explained.candidates] == ["p0", "p1", "d1", "d0"]
        assert "pull" not in explained.candidates[0].reason


async def test_asking_for_an_estimate_says_nothing_of_the_workers_health() -> None:
    async with running(settings={"worker_cooldown_seconds": 0}) as stack:
        stack.give_handle("c", "d0")
        unreachable = UnavailableError("", reason="WORKER_UNREACHABLE")
        with pytest.raises(UnavailableError), stack.router.pool.use("p0"):
            raise unreachable
        await explain(stack)
        assert len(stack["p0"].estimates) == 1
        assert stack.router.pool.breakers(BreakerState.HALF_OPEN) == 1


async def test_explanation_for_an_unknown_model_is_not_found() -> None:
    async with running() as stack:
        request = router_pb2.ExplainRouteRequest(model="huge")
        with pytest.raises(ModelNotFoundError), rpc.typed_errors():
            await stack.stub.ExplainRoute(request)


async def test_metrics_are_served_while_the_router_runs() -> None:
    async with running(settings={"metrics_listen": "127.0.0.1:0"}) as stack:
        await stack.chat("c")
        url = f"http://127.0.0.1:{stack.router.metrics_port}/metrics"
        text = await asyncio.to_thread(_get, url)
        assert 'kvloop_router_misses_total{reason="first_turn"} 1.0' in text
        assert 'kvloop_router_fallbacks_total{cause="prefill_left_out"} 0.0' in text
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(_get, url)


async def test_health_is_served() -> None:
    async with running() as stack:
        stub = health_pb2_grpc.HealthStub(stack.channel)
        request = health_pb2.HealthCheckRequest(service="kvloop.router.v1.RouterService")
        checked = await stub.Check(request)  # type: ignore[attr-defined]
        assert checked.status == health_pb2.HealthCheckResponse.SERVING


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as reply:
        return str(reply.read(), "utf-8")
