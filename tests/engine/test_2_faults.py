"""Nothing that goes wrong around a turn makes its answer wrong or its client wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvloop.errors import InvalidFieldError, KvloopError, ModelNotFoundError
from tests.engine.engines import eventually
from tests.engine.turns import ANSWER, NUM_BLOCKS, first_turn, generate, start_kvmeta
from tests.engine.world import MODEL, World


async def test_kvmeta_killed_and_restarted_between_turns_still_pulls(world: World) -> None:
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    world.stack.kill("kvmeta")
    await start_kvmeta(world)
    await world.prefill.forget_prefixes()
    prompt = [*history, *world.tokens(20)]
    done = await generate(world, prompt, conversation)
    assert done.receipt.pulled_tokens == len(history) - 1
    assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)


async def test_turns_answer_while_kvmeta_is_down(world: World) -> None:
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    usage = await world.decode.kv_usage()
    world.stack.kill("kvmeta")
    try:
        prompt = [*history, *world.tokens(20)]
        done = await generate(world, prompt, conversation)
        assert done.receipt.miss_reason == "LEDGER_UNAVAILABLE"
        assert done.receipt.retain_outcome == "LEDGER_UNAVAILABLE"
        assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)

        async def released() -> bool:
            return await world.decode.kv_usage() <= usage

        await eventually(released, "KV that no ledger row owns is freed")
    finally:
        await start_kvmeta(world)
    # The old handle is still there; it proves and pulls as far as it goes.
    after = await generate(world, [*prompt, *done.token_ids, 5], conversation)
    assert after.receipt.handle_hit
    assert after.receipt.retain_outcome == "RETAINED"


async def test_cancelled_stream_stops_both_engines_and_stores_nothing(world: World) -> None:
    conversation = world.conversation()
    usage = await world.decode.kv_usage()
    async with world.client.generate(
        world.tokens(300),
        model=MODEL,
        conversation_id=conversation,
        max_tokens=8000,
        temperature=0,
    ) as answer:
        chunks = 0
        async for _ in answer:
            chunks += 1
            if chunks == 5:
                break

    async def idle() -> bool:
        return await world.prefill.running() + await world.decode.running() == 0

    await eventually(idle, "both engines are idle")

    async def freed() -> bool:
        return await world.decode.kv_usage() <= usage

    await eventually(freed, "decode has freed the aborted request's blocks")
    done = await generate(world, world.tokens(100), conversation)
    assert done.receipt.miss_reason == "FIRST_TURN"


async def test_cancelled_prefill_stops_the_prefill_engine(world: World) -> None:
    call = world.client.generate(
        world.tokens(12_000), model=MODEL, conversation_id=world.conversation(), max_tokens=5
    )
    waiting = asyncio.ensure_future(call.collect())

    async def running() -> bool:
        return await world.prefill.running() > 0

    await eventually(running, "the prefill engine works on the prompt")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    async def idle() -> bool:
        return await world.prefill.running() + await world.decode.running() == 0

    await eventually(idle, "both engines are idle")


async def test_turns_cancelled_before_prefill_began_free_what_decode_retains(world: World) -> None:
    """Their handles are taken, and the prefill engine never gets to use them."""
    turns: list[tuple[str, list[int]]] = []
    for _ in range(4):
        conversation = world.conversation()
        history = await first_turn(world, conversation, count=1500)
        turns.append((conversation, [*history, *world.tokens(50)]))
    held = await world.decode.kv_usage()
    busy = [
        asyncio.ensure_future(
            world.client.generate(world.tokens(8_000), model=MODEL, max_tokens=1).collect()
        )
        for _ in range(2)
    ]

    async def working() -> bool:
        return await world.prefill.running() >= 2

    await eventually(working, "the prefill engine is busy")
    waiting = [
        asyncio.ensure_future(
            world.client.generate(
                prompt, model=MODEL, conversation_id=conversation, max_tokens=5
            ).collect()
        )
        for conversation, prompt in turns
    ]

    async def queued() -> bool:
        return await world.prefill.running() >= 4

    await eventually(queued, "the turns wait behind the busy ones")
    for turn in waiting:
        turn.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.gather(*busy)

    async def freed() -> bool:
        return (held - await world.decode.kv_usage()) * NUM_BLOCKS >= 4 * (1500 // 32)

    await eventually(freed, "decode has freed the cancelled turns' handles")


BAD_CHATS: dict[str, tuple[dict[str, Any], type[KvloopError], str]] = {
    "unknown model": ({"model": "no-such-model"}, ModelNotFoundError, "model"),
    "no messages": ({"messages": []}, InvalidFieldError, "messages"),
    "unknown role": (
        {"messages": [{"role": "robot", "content": "x"}]},
        InvalidFieldError,
        "messages[0].role",
    ),
    "negative max_tokens": (
        {"extra_body": {"max_completion_tokens": -1}},
        InvalidFieldError,
        "max_completion_tokens",
    ),
    "zero max_tokens": ({"max_tokens": 0}, InvalidFieldError, "sampling.max_tokens"),
    "temperature too high": ({"temperature": 7.0}, InvalidFieldError, "sampling.temperature"),
    "wrong type": ({"extra_body": {"top_logprobs": "many"}}, InvalidFieldError, "top_logprobs"),
    "transfer params": (
        {"extra_body": {"kv_transfer_params": {"do_remote_decode": True}}},
        InvalidFieldError,
        "kv_transfer_params",
    ),
    "much too long": (
        {"messages": [{"role": "user", "content": "word " * 40_000}]},
        InvalidFieldError,
        "messages",
    ),
}


@pytest.mark.parametrize("case", BAD_CHATS)
async def test_bad_chat_is_refused_by_field_before_prefill(world: World, case: str) -> None:
    changes, error, field = BAD_CHATS[case]
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "conversation_id": world.conversation(),
        **changes,
    }
    messages = fields.pop("messages")
    with pytest.raises(error) as refused:
        await _untouched(world, lambda: world.client.chat(messages, **fields).collect())
    assert refused.value.metadata["field"].endswith(field)


async def test_token_prompt_longer_than_the_model_is_refused_before_prefill(world: World) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        await _untouched(
            world,
            lambda: world.client.generate(
                world.tokens(17_000), model=MODEL, max_tokens=5
            ).collect(),
        )
    assert "16384" in refused.value.message


async def _untouched(world: World, call: Callable[[], Any]) -> None:
    """Run a call and check that the prefill engine has not seen a prompt token."""
    seen = await world.prefill.counter("vllm:prompt_tokens_total")
    started = await world.prefill.counter("vllm:request_success_total")
    try:
        await call()
    finally:
        assert await world.prefill.counter("vllm:prompt_tokens_total") == seen
        assert await world.prefill.counter("vllm:request_success_total") == started
