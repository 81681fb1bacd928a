"""The prefill leg fails in each way: what becomes of the handle and of the turn."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvloop.errors import (
    DeadlineError,
    InternalError,
    InvalidFieldError,
    KvloopError,
    LimitError,
    PreconditionError,
    UnavailableError,
)
from tests.flow.patience import HELD_UP_SECONDS
from tests.flow.router.fakes import eventually, raises, waits
from tests.flow.router.stack import Stack, running
from tests.links import Link, to_port

UNREACHABLE = UnavailableError("no engine", reason="ENGINE_UNREACHABLE")
DRAINING = UnavailableError("draining", reason="DRAINING")
WRONG_ROLE = PreconditionError("wrong role", reason="WRONG_ROLE")
ENGINE_LOST = UnavailableError("engine died", reason="ENGINE_LOST")
ENGINE_FAILED = InternalError("engine said 500", reason="ENGINE_FAILED", http_status=500)
REJECTED = InvalidFieldError(
    "the engine refused", reason="ENGINE_REJECTED", http_status=400, engine_message="too long"
)


def all_params(stack: Stack) -> list[bytes]:
    return [params for worker in stack.workers.values() for params in worker.params_seen]


@pytest.mark.parametrize("error", [UNREACHABLE, DRAINING, WRONG_ROLE])
async def test_unseen_handle_goes_to_another_prefill_worker(error: KvloopError) -> None:
    async with running(prefill=["p0", "p1"]) as stack:
        handle_id = stack.give_handle("c", "d0")
        stack["p0"].prefill_steps = [raises(error)]
        answer = await stack.chat("c")
        assert answer.receipt.prefill_worker_id == "p1"
        assert answer.receipt.handle_hit
        assert answer.miss == "UNSPECIFIED"
        assert len(stack["p1"].params_seen) == 1
        assert stack.ledger.taken == [handle_id]
        assert stack.ledger.returned == []
        assert stack.count("fallbacks_total", cause="prefill_repeated") == 1


@pytest.mark.parametrize("error", [UNREACHABLE, DRAINING])
async def test_unseen_handle_is_returned_if_no_prefill_worker_is_left(error: KvloopError) -> None:
    async with running() as stack:
        handle_id = stack.give_handle("c", "d0")
        stack["p0"].prefill_steps = [raises(error)]
        answer = await stack.chat("c")
        assert stack.ledger.returned == [handle_id]
        assert answer.miss == "INCOMPATIBLE"
        assert not answer.receipt.handle_hit
        assert answer.receipt.prefill_worker_id == ""
        assert stack["d0"].decodes[0].transfer_params_json == b""
        assert stack.count("fallbacks_total", cause="prefill_left_out") == 1
        assert stack.count("handle_returns_total", outcome="unused") == 1


@pytest.mark.parametrize(
    "error",
    [ENGINE_FAILED, ENGINE_LOST, LimitError("queue full"), UnavailableError("?", reason="OTHER")],
)
async def test_a_handle_that_may_have_been_used_is_not_used_again(error: KvloopError) -> None:
    async with running(prefill=["p0", "p1"]) as stack:
        stack.give_handle("c", "d0")
        stack["p0"].prefill_steps = [raises(error)]
        answer = await stack.chat("c")
        assert answer.miss == "PREFILL_FAILED"
        assert answer.receipt.handle_hit
        assert answer.receipt.prefill_worker_id == "p1"
        assert stack["p1"].prefills[0].transfer_params_json == b""
        assert stack.ledger.returned == []
        assert len(all_params(stack)) == 1


async def test_the_only_prefill_worker_is_asked_again_without_the_handle() -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        stack["p0"].prefill_steps = [raises(ENGINE_FAILED)]
        answer = await stack.chat("c")
        assert [bool(call.transfer_params_json) for call in stack["p0"].prefills] == [True, False]
        assert answer.miss == "PREFILL_FAILED"
        assert answer.receipt.prefill_worker_id == "p0"


async def test_a_prefill_leg_that_fails_twice_is_left_out() -> None:
    async with running(prefill=["p0", "p1", "p2"]) as stack:
        stack["p0"].prefill_steps = [raises(ENGINE_FAILED)]
        stack["p1"].prefill_steps = [raises(ENGINE_FAILED)]
        answer = await stack.chat("c")
        assert answer.receipt.prefill_worker_id == ""
        assert not answer.receipt.HasField("prefill")
        assert stack["p2"].calls == 0
        assert stack["d0"].decodes[0].transfer_params_json == b""
        assert answer.miss == "FIRST_TURN"


async def test_rejection_by_the_engine_returns_the_handle_and_reaches_the_client() -> None:
    async with running(prefill=["p0", "p1"]) as stack:
        handle_id = stack.give_handle("c", "d0")
        stack["p0"].prefill_steps = [raises(REJECTED)]
        with pytest.raises(InvalidFieldError) as caught:
            await stack.chat("c")
        assert caught.value.reason == "ENGINE_REJECTED"
        assert caught.value.metadata["http_status"] == "400"
        assert caught.value.metadata["engine_message"] == "too long"
        assert stack.ledger.returned == [handle_id]
        assert stack["p1"].calls == 0
        assert stack["d0"].calls == 0
        assert stack.count("turns_total", outcome="rejected") == 1
        assert (await stack.chat("c")).receipt.handle_hit


async def test_refused_connection_uses_no_handle() -> None:
    async with running(prefill=["p0", "p1"]) as stack:
        stack.give_handle("c", "d0")
        gone = stack["p0"].worker
        gone.address = "127.0.0.1:1"
        stack.registry.add(gone)
        await eventually(lambda: _address(stack, "p0") == "127.0.0.1:1")
        answer = await stack.chat("c")
        assert answer.receipt.prefill_worker_id == "p1"
        assert answer.receipt.handle_hit
        assert stack["p0"].calls == 0
        assert stack.count("fallbacks_total", cause="prefill_repeated") == 1


async def test_connection_that_breaks_under_the_call_spends_the_handle() -> None:
    async with running(prefill=["p0", "p1"]) as stack:
        stack.give_handle("c", "d0")
        _, _, port = stack["p0"].worker.address.rpartition(":")
        async with Link(to_port(int(port))) as link:
            stack["p0"].prefill_steps = [waits(asyncio.Event())]
            linked = stack["p0"].worker
            linked.address = f"127.0.0.1:{link.port}"
            stack.registry.add(linked)
            await eventually(lambda: _address(stack, "p0") == linked.address)
            async with asyncio.TaskGroup() as tasks:
                turn = tasks.create_task(stack.chat("c"))
                await eventually(lambda: stack["p0"].prefills)
                link.cut()
            answer = turn.result()
        assert answer.miss == "PREFILL_FAILED"
        assert answer.receipt.prefill_worker_id == "p1"
        assert stack["p1"].prefills[0].transfer_params_json == b""
        assert stack.ledger.returned == []


async def test_later_turns_avoid_a_prefill_worker_that_was_not_reached() -> None:
    settings = {"worker_cooldown_seconds": 3600}
    async with running(prefill=["p0", "p1"], settings=settings) as stack:
        stack["p0"].prefill_steps = [raises(UNREACHABLE)]
        await stack.chat("a")
        await stack.chat("b")
        assert len(stack["p0"].prefills) == 1
        assert len(stack["p1"].prefills) == 2


async def test_slow_prefill_is_given_up_and_repeated_without_the_handle() -> None:
    settings = {"prefill_timeout_seconds": HELD_UP_SECONDS}
    async with running(prefill=["p0", "p1"], settings=settings) as stack:
        stack.give_handle("c", "d0")
        stack["p0"].prefill_steps = [waits(asyncio.Event())]
        answer = await stack.chat("c")
        assert answer.miss == "PREFILL_FAILED"
        assert answer.receipt.prefill_worker_id == "p1"
        await eventually(lambda: stack["p0"].cancelled == ["prefill"])


async def test_deadline_of_the_client_ends_the_prefill_leg_without_a_repeat() -> None:
    async with running(prefill=["p0", "p1"], clock=time.monotonic) as stack:
        stack.give_handle("c", "d0")
        stack["p0"].prefill_steps = [waits(asyncio.Event())]
        with pytest.raises(DeadlineError):
            await stack.chat("c", timeout_seconds=HELD_UP_SECONDS)
        await eventually(lambda: stack["p0"].cancelled == ["prefill"])
        await eventually(lambda: stack.count("turns_total", outcome="cancelled") == 1)
        assert stack["p1"].calls == 0
        assert stack.ledger.returned == []
        assert stack.count("fallbacks_total", cause="prefill_repeated") == 0
        assert stack.count("fallbacks_total", cause="prefill_left_out") == 0


async def test_missing_hand_over_is_counted_and_decode_computes_the_prompt() -> None:
    async with running() as stack:
        stack["p0"].handover = b""
        answer = await stack.chat("c")
        assert answer.receipt.prefill_worker_id == "p0"
        assert stack["d0"].decodes[0].transfer_params_json == b""
        assert stack.count("fallbacks_total", cause="no_handover") == 1


async def test_without_any_prefill_worker_the_decode_worker_answers_alone() -> None:
    async with running(prefill=[]) as stack:
        handle_id = stack.give_handle("c", "d0")
        answer = await stack.chat("c")
        assert answer.receipt.prefill_worker_id == ""
        assert answer.miss == "INCOMPATIBLE"
        assert stack.ledger.returned == [handle_id]


@pytest.mark.parametrize(
    "traits",
    [
        {"contract_version": 2},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"bidirectional_kv_xfer": False},
    ],
)
async def test_incompatible_prefill_worker_never_sees_the_handle(traits) -> None:
    async with running(traits={"p0": traits}) as stack:
        handle_id = stack.give_handle("c", "d0")
        answer = await stack.chat("c")
        assert answer.miss == "INCOMPATIBLE"
        assert stack["p0"].prefills[0].transfer_params_json == b""
        assert stack.ledger.returned == [handle_id]
        assert stack.count("fallbacks_total", cause="no_compatible_prefill") == 1


async def test_the_compatible_prefill_worker_is_preferred_for_a_handle() -> None:
    traits = {"p0": {"contract_version": 2}}
    async with running(prefill=["p0", "p1"], traits=traits) as stack:
        stack.give_handle("c", "d0")
        assert (await stack.chat("c")).receipt.prefill_worker_id == "p1"


async def test_prefill_that_cannot_hand_over_is_not_used() -> None:
    async with running(traits={"p0": {"block_size": 32}}) as stack:
        answer = await stack.chat("c")
        assert stack["p0"].calls == 0
        assert answer.receipt.prefill_worker_id == ""


async def test_restarted_holder_voids_the_handle() -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        stack["d0"].worker.engine.epoch = "2"
        stack.registry.add(stack["d0"].worker)
        await eventually(lambda: _epoch(stack, "d0") == "2")
        answer = await stack.chat("c")
        assert answer.miss == "VOID"
        assert all_params(stack) == []
        assert stack.count("fallbacks_total", cause="holder_restarted") == 1


async def test_unknown_holder_is_not_pulled_from() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        handle_id = stack.give_handle("c", "d0")
        stack.registry.remove("d0")
        await eventually(lambda: stack.router.pool.find("d0") is None)
        answer = await stack.chat("c")
        assert answer.miss == "INCOMPATIBLE"
        assert answer.receipt.decode_worker_id == "d1"
        assert stack.ledger.returned == [handle_id]
        assert stack.count("fallbacks_total", cause="holder_unreachable") == 1


async def test_draining_holder_is_still_pulled_from_while_another_decodes() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        stack.give_handle("c", "d0")
        stack["d0"].worker.state = stack["d0"].worker.STATE_DRAINING
        stack.registry.add(stack["d0"].worker)
        await eventually(lambda: not _takes_turns(stack, "d0"))
        answer = await stack.chat("c")
        assert answer.receipt.handle_hit
        assert answer.receipt.decode_worker_id == "d1"


def _address(stack: Stack, worker_id: str) -> str:
    found = stack.router.pool.find(worker_id)
    return found.worker.address if found else ""


def _epoch(stack: Stack, worker_id: str) -> str:
    found = stack.router.pool.find(worker_id)
    return found.worker.engine.epoch if found else ""


def _takes_turns(stack: Stack, worker_id: str) -> bool:
    found = stack.router.pool.find(worker_id)
    return found is not None and found.takes_turns
