"""The decode leg fails before and after its first chunk."""

from __future__ import annotations

import asyncio

import pytest

from kvloop import rpc
from kvloop.errors import InternalError, InvalidFieldError, KvloopError, UnavailableError
from tests.flow.router.breakable_link import BreakableLink
from tests.flow.router.fakes import eventually, raises, waits
from tests.flow.router.stack import chat_request, running

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
        async with BreakableLink(int(port)) as link:
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


def _address(stack) -> str:
    found = stack.router.pool.find("d0")
    return found.worker.address if found else ""
