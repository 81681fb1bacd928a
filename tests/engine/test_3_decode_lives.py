"""Handles that outlive their time, and decode engines that restart."""

from __future__ import annotations

import asyncio

import pytest

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.engine.turns import ANSWER, first_turn, generate, take_handle
from tests.engine.world import MODEL, TTL_SECONDS, World


async def test_handle_is_not_given_out_after_its_time(world: World) -> None:
    """Three conversations of the same age meet three ends of their TTL.

    The first asks the ledger in time but prefill 2.5 s before the end, within
    vLLM's safety margin of 5 s; the second asks prefill after the blocks are
    gone; the third asks the ledger too late.
    """
    loop = asyncio.get_running_loop()
    conversations = [world.conversation() for _ in range(3)]
    histories = [await first_turn(world, conversation) for conversation in conversations]
    committed = loop.time()
    within_margin, gone = [
        await take_handle(world, conversation) for conversation in conversations[:2]
    ]
    await world.prefill.forget_prefixes()

    await asyncio.sleep(committed + TTL_SECONDS - 2.5 - loop.time())
    for history, handle, when in (
        (histories[0], within_margin, TTL_SECONDS - 2.5),
        (histories[1], gone, TTL_SECONDS + 3),
    ):
        await asyncio.sleep(max(0.0, committed + when - loop.time()))
        pulled = await world.prefill.pulled_tokens()
        prompt = [*history, *world.tokens(20)]
        report = await _prefill(world, prompt, handle)
        assert common_pb2.MissReason.Name(report.miss_reason) == "MISS_REASON_ENGINE_EXPIRED"
        assert report.proven_tokens == len(history) - 1
        assert report.pulled_tokens == 0
        assert report.recomputed_tokens == len(prompt)
        assert await world.prefill.pulled_tokens() == pulled

    prompt = [*histories[2], *world.tokens(20)]
    done = await generate(world, prompt, conversations[2])
    assert done.receipt.miss_reason == "EXPIRED"
    assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)


async def _prefill(
    world: World, prompt: list[int], handle: ledger_pb2.Handle
) -> common_pb2.PrefillReport:
    """A prefill leg with this handle, past router and ledger."""
    body = f'{{"model":"{MODEL}","prompt":{prompt},"max_tokens":5}}'
    async with rpc.open_channel(world.stack.address("prefill-0")) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        reply = await worker.Prefill(
            worker_pb2.PrefillRequest(
                turn_id=f"test-{handle.handle_id}"[:64],
                api=common_pb2.API_COMPLETIONS,
                body_json=body.encode(),
                transfer_params_json=handle.transfer_params_json,
            )
        )
    return reply.report


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_decode_restarted_between_turns_recomputes(world: World, end: str) -> None:
    """Also by SIGKILL: no farewell to anyone, and the engine goes with its sidecar."""
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    if end == "stop":
        await world.stack.stop("decode-0")
    else:
        world.stack.kill("decode-0")
    await world.stack.start("decode-0")
    prompt = [*history, *world.tokens(20)]
    done = await generate(world, prompt, conversation)
    # Loading the engine takes about as long as the TTL: either may come first.
    assert done.receipt.miss_reason in ("VOID", "EXPIRED")
    assert done.receipt.pulled_tokens == 0
    assert done.receipt.retain_outcome == "RETAINED"
    assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)
    # The new life is used like the old one.
    next_prompt = [*prompt, *done.token_ids, *world.tokens(20)]
    await world.prefill.forget_prefixes()
    after = await generate(world, next_prompt, conversation)
    assert after.receipt.pulled_tokens == len(prompt) + ANSWER - 1
    assert after.token_ids == await world.prefill.recompute_prompt(next_prompt, ANSWER)
