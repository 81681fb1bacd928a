"""The decode leg fails before and after its first chunk."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from kvloop import rpc
from kvloop.errors import (
    DeadlineError,
    InternalError,
    InvalidFieldError,
    KvloopError,
    UnavailableError,
)
from tests.flow.router.fakes import eventually, raises, waits
from tests.flow.router.stack import Stack, chat_request, running
from tests.links import Link, to_port

UNREACHABLE = UnavailableError("no engine", reason="ENGINE_UNREACHABLE")
DRAINING = UnavailableError("draining", reason="DRAINING")
ENGINE_LOST = UnavailableError("engine died", reason="ENGINE_LOST")
ENGINE_FAILED = InternalError(
    "engine said 500", reason="ENGINE_FAILED", http_status=500, engine_message="KV load failed"
)


@pytest.mark.parametrize("error", [UNREACHABLE, DRAINING])
async def test_unused_hand_over_goes_to_another_decode_worker(error: KvloopError) -> None:
    async with running(decode=["d0", "d1"]) as stack:
        stack["d0"].decode_steps = [raises(error)]
        answer = await stack.chat("c")
        assert answer.receipt.decode_worker_id == "d1"
        given = [stack[d].decodes[0].transfer_params_json for d in ("d0", "d1")]
        assert given[0] == given[1] != b""
        assert answer.chunks == stack["d1"].chunks
        assert stack.count("fallbacks_total", cause="decode_repeated") == 1
        assert stack.count("fallbacks_total", cause="handover_dropped") == 0


@pytest.mark.parametrize("error", [ENGINE_FAILED, ENGINE_LOST])
async def test_hand_over_that_may_have_been_read_is_not_read_again(error: KvloopError) -> None:
    async with running(decode=["d0", "d1"]) as stack:
        stack["d0"].decode_steps = [raises(error)]
        answer = await stack.chat("c")
        assert answer.receipt.decode_worker_id == "d1"
        assert stack["d1"].decodes[0].transfer_params_json == b""
        assert stack.count("fallbacks_total", cause="handover_dropped") == 1


async def test_hand_over_is_dropped_if_the_other_worker_cannot_read_it() -> None:
    async with running(decode=["d0", "d1"], traits={"d1": {"block_size": 32}}) as stack:
        stack["d0"].decode_steps = [raises(UNREACHABLE)]
        await stack.chat("c")
        assert stack["d1"].decodes[0].transfer_params_json == b""


async def test_the_only_decode_worker_is_asked_again_without_the_hand_over() -> None:
    async with running() as stack:
        stack["d0"].decode_steps = [raises(ENGINE_FAILED)]
        answer = await stack.chat("c")
        assert [bool(c.transfer_params_json) for c in stack["d0"].decodes] == [True, False]
        assert answer.chunks == stack["d0"].chunks


async def test_failure_without_a_hand_over_is_not_repeated_on_the_same_worker() -> None:
    async with running(prefill=[]) as stack:
        stack["d0"].decode_steps = [raises(ENGINE_FAILED)]
        with pytest.raises(InternalError) as caught:
            await stack.chat("c")
        assert caught.value.reason == "ENGINE_FAILED"
        assert caught.value.metadata["http_status"] == "500"
        assert caught.value.metadata["engine_message"] == "KV load failed"
        assert len(stack["d0"].decodes) == 1
        assert stack.count("turns_total", outcome="failed") == 1


async def test_a_worker_that_failed_is_asked_again_rather_than_one_that_is_avoided() -> None:
    async with running(decode=["d0", "d1"], settings={"worker_cooldown_seconds": 3600}) as stack:
        _break(stack, "d1", UNREACHABLE)
        stack["d0"].decode_steps = [raises(ENGINE_FAILED)]
        answer = await stack.chat("c")
        assert answer.receipt.decode_worker_id == "d0"
        assert [bool(c.transfer_params_json) for c in stack["d0"].decodes] == [True, False]
        assert stack["d1"].calls == 0


async def test_a_worker_that_is_avoided_is_asked_if_the_other_is_down() -> None:
    async with running(decode=["d0", "d1"], settings={"worker_cooldown_seconds": 3600}) as stack:
        _break(stack, "d1", UNREACHABLE)
        stack["d0"].decode_steps = [raises(ENGINE_LOST)]
        assert (await stack.chat("c")).receipt.decode_worker_id == "d1"


async def test_one_of_the_turns_that_chose_a_worker_before_prefill_tries_it_again() -> None:
    async with running(decode=["d0", "d1"], settings={"worker_cooldown_seconds": 0}) as stack:
        _break(stack, "d0", UNREACHABLE)
        prefill, decode = asyncio.Event(), asyncio.Event()
        stack["p0"].prefill_steps = [waits(prefill) for _ in range(3)]
        stack["d0"].decode_steps = [waits(decode)]
        async with asyncio.TaskGroup() as tasks:
            turns = [tasks.create_task(stack.chat(f"c{n}")) for n in range(3)]
            await eventually(lambda: len(stack["p0"].prefills) == 3)
            prefill.set()
            await eventually(lambda: sum(turn.done() for turn in turns) == 2)
            decode.set()
        served = sorted(turn.result().receipt.decode_worker_id for turn in turns)
        assert served == ["d0", "d1", "d1"]
        assert all(call.transfer_params_json for call in stack["d1"].decodes)
        assert stack.count("fallbacks_total", cause="decode_repeated") == 0


@pytest.mark.parametrize(("block_size", "dropped"), [(16, 0), (32, 1)])
async def test_a_turn_leaves_a_worker_that_failed_others_during_its_prefill(
    block_size: int, dropped: int
) -> None:
    traits = {"d1": {"block_size": block_size}}
    async with running(decode=["d0", "d1"], traits=traits) as stack:

        async def step() -> None:
            _break(stack, "d0", UNREACHABLE)

        stack["p0"].prefill_steps = [step]
        answer = await stack.chat("c")
        assert answer.receipt.decode_worker_id == "d1"
        assert bool(stack["d1"].decodes[0].transfer_params_json) is not bool(dropped)
        assert stack.count("fallbacks_total", cause="handover_dropped") == dropped
        assert stack["d0"].calls == 0


async def test_an_answer_without_a_summary_is_a_failure_of_the_worker() -> None:
    async with running(settings={"worker_failures": 1}) as stack:
        stack["d0"].incomplete = True
        with pytest.raises(InternalError) as caught:
            await stack.chat("c")
        assert caught.value.reason == "ANSWER_INCOMPLETE"
        assert not _is_reachable(stack, "d0")


@pytest.mark.parametrize("batches", [False, True])
async def test_a_failure_after_the_summary_costs_nothing_of_the_answer(batches: bool) -> None:
    async with running() as stack:
        stack["d0"].batches = batches
        stack["d0"].after_summary_steps = [raises(ENGINE_LOST)]
        answer = await stack.chat("c")
        assert answer.chunks == stack["d0"].chunks
        assert answer.receipt.retained_tokens == 102
        assert len(stack["d0"].decodes) == 1
        assert stack.count("turns_total", outcome="answered") == 1


async def test_a_worker_that_drains_is_left_and_still_pulled_from() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        stack.give_handle("c", "d0")
        stack["d0"].decode_steps = [raises(DRAINING)]
        assert (await stack.chat("other")).receipt.decode_worker_id == "d1"
        answer = await stack.chat("c")
        assert answer.receipt.handle_hit
        assert answer.receipt.decode_worker_id == "d1"
        assert stack.count("breaker_openings_total") == 0
        assert len(stack["d0"].decodes) == 1


@pytest.mark.parametrize("silent_id", ["p0", "d0"])
async def test_a_caller_without_patience_says_nothing_of_a_worker(silent_id: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # The router gives up well before the caller hangs up.
        settings = {"deadline_margin_seconds": 19.5}
        async with running(settings=settings, clock=time.monotonic) as stack:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            stack[silent_id].worker.address = address
            stack.registry.add(stack[silent_id].worker)
            await eventually(lambda: _address(stack, silent_id) == address)
            with pytest.raises(DeadlineError):
                await stack.chat("c", timeout_seconds=20)
            await eventually(lambda: stack.count("turns_total", outcome="cancelled") == 1)
            assert _is_reachable(stack, silent_id)


async def test_a_decode_leg_is_repeated_once_only() -> None:
    async with running(decode=["d0", "d1", "d2"]) as stack:
        for worker_id in ("d0", "d1"):
            stack[worker_id].decode_steps = [raises(ENGINE_LOST)]
        with pytest.raises(UnavailableError) as caught:
            await stack.chat("c")
        assert caught.value.reason == "ENGINE_LOST"
        assert stack["d2"].calls == 0


async def test_rejection_by_the_decode_engine_is_not_repeated() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        stack["d0"].decode_steps = [
            raises(InvalidFieldError("no", reason="ENGINE_REJECTED", http_status=400))
        ]
        with pytest.raises(InvalidFieldError):
            await stack.chat("c")
        assert stack["d1"].calls == 0


async def test_after_the_first_chunk_a_failure_ends_the_answer() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        stack["d0"].mid_answer_steps = [raises(ENGINE_LOST)]
        events = aiter(stack.stub.Chat(chat_request("c")))
        assert (await anext(events)).chunk.json == stack["d0"].chunks[0]
        with pytest.raises(UnavailableError) as caught, rpc.typed_errors():
            await anext(events)
        assert caught.value.reason == "ENGINE_LOST"
        assert stack["d1"].calls == 0


async def test_a_worker_that_cannot_be_reached_is_named_without_its_address() -> None:
    async with running() as stack:
        stack["d0"].worker.address = "127.0.0.1:1"
        stack.registry.add(stack["d0"].worker)
        await eventually(lambda: _address(stack) == "127.0.0.1:1")
        with pytest.raises(UnavailableError) as caught:
            await stack.chat("c")
        assert caught.value.reason == "WORKER_UNREACHABLE"
        assert "d0" in caught.value.message
        assert "127.0.0.1" not in caught.value.message


async def test_connection_that_breaks_mid_answer_ends_it() -> None:
    async with running() as stack:
        _, _, port = stack["d0"].worker.address.rpartition(":")
        async with Link(to_port(int(port))) as link:
            stack["d0"].worker.address = f"127.0.0.1:{link.port}"
            stack.registry.add(stack["d0"].worker)
            await eventually(lambda: _address(stack) == stack["d0"].worker.address)
            stack["d0"].mid_answer_steps = [waits(asyncio.Event())]
            events = aiter(stack.stub.Chat(chat_request("c")))
            await anext(events)
            link.cut()
            with pytest.raises(UnavailableError) as caught, rpc.typed_errors():
                await anext(events)
        assert caught.value.reason == "WORKER_LOST"


async def test_health_beats_affinity() -> None:
    async with running(decode=["d0", "d1"], settings={"worker_cooldown_seconds": 3600}) as stack:
        await stack.chat("c")
        stack["d0"].decode_steps = [raises(UNREACHABLE)]
        first = await stack.chat("c")
        stack.give_handle("c", "d0")
        second = await stack.chat("c")
        assert first.receipt.decode_worker_id == "d1"
        assert second.receipt.decode_worker_id == "d1"
        assert second.miss == "INCOMPATIBLE"  # its holder cannot be reached


def _address(stack: Stack, worker_id: str = "d0") -> str:
    found = stack.router.pool.find(worker_id)
    return found.worker.address if found else ""


def _is_reachable(stack: Stack, worker_id: str) -> bool:
    found = stack.router.pool.find(worker_id)
    return found is not None and found.reachable


def _break(stack: Stack, worker_id: str, error: KvloopError) -> None:
    """Let another turn fail there."""
    with pytest.raises(type(error)), stack.router.pool.use(worker_id):
        raise error
