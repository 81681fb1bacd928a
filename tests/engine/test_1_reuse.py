"""Turn 2 pulls what decode retained, and answers as if everything were recomputed.

Every claim is checked against the engines' own counters and against a greedy
answer that the prefill engine computes from scratch under a fresh cache salt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvloop import Completion
from kvloop.errors import KvloopError
from tests.engine.engines import EngineProbe, eventually, open_session
from tests.engine.turns import ANSWER, NUM_BLOCKS, chat, first_turn, generate
from tests.engine.world import MODEL, World


async def test_streamed_token_turn_pulls_and_is_exact(world: World) -> None:
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    prompt = [*history, *world.tokens(40)]
    await world.prefill.forget_prefixes()
    pulled, computed = await world.prefill.pulled_tokens(), await world.prefill.computed_tokens()

    done = await generate(world, prompt, conversation)

    held = len(history) - 1
    assert await world.prefill.pulled_tokens() - pulled == held
    assert await world.prefill.computed_tokens() - computed == len(prompt) - held
    receipt = done.receipt
    assert receipt.handle_hit
    assert receipt.miss_reason is None
    assert receipt.turn == 2
    assert receipt.proven_tokens == receipt.pulled_tokens == held
    assert receipt.cached_tokens == 0
    assert receipt.recomputed_tokens == len(prompt) - held
    assert 0 < receipt.prefill_leg_seconds < receipt.ttft_seconds
    assert 0 < receipt.decode_leg_seconds < receipt.ttft_seconds
    assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)


async def test_the_bodies_of_both_legs_go_ahead_of_them(world: World) -> None:
    """As those of all turns here do: the router is told to let short ones go ahead too."""
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    prompt = [*history, *world.tokens(40)]
    await world.prefill.forget_prefixes()
    async with open_session() as session:
        router = EngineProbe(world.stack.gateway_url, session, MODEL)
        before = await _bodies_ahead(router)
        done = await generate(world, prompt, conversation)
        after = await _bodies_ahead(router)
    assert done.receipt.pulled_tokens == len(history) - 1
    assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)
    assert {way: after[way] - before[way] for way in after} == {
        ("prefill", "used"): 1,
        ("prefill", "lost"): 0,
        ("decode", "used"): 1,
        ("decode", "lost"): 0,
    }


async def _bodies_ahead(router: EngineProbe) -> dict[tuple[str, str], float]:
    return {
        (leg, outcome): await router.counter(
            "kvloop_router_bodies_ahead_total", leg=leg, outcome=outcome
        )
        for leg in ("prefill", "decode")
        for outcome in ("used", "lost")
    }


async def test_streamed_chat_turns_pull_and_are_exact(world: World) -> None:
    conversation = world.conversation()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": world.words(150)},
        {"role": "user", "content": world.words(100)},
    ]
    retained = 0
    for turn in range(1, 4):
        await world.prefill.forget_prefixes()
        pulled = await world.prefill.pulled_tokens()
        done = await chat(world, messages, conversation)
        moved = await world.prefill.pulled_tokens() - pulled
        receipt = done.receipt
        assert receipt.turn == turn
        if turn == 1:
            assert (receipt.miss_reason, moved) == ("FIRST_TURN", 0)
        else:
            assert receipt.miss_reason is None
            assert moved == receipt.pulled_tokens == retained
        retained = receipt.retained_tokens
        assert done.token_ids == await world.prefill.recompute_chat(messages, ANSWER)
        messages += [
            {"role": "assistant", "content": done.text},
            {"role": "user", "content": world.words(30)},
        ]


async def test_a_long_chat_that_decode_gets_as_token_ids_is_exact(world: World) -> None:
    conversation = world.conversation()
    messages: list[dict[str, Any]] = [{"role": "user", "content": world.words(900)}]
    assert len(messages[0]["content"]) > 4096  # or decode would tokenize it again
    for _ in range(2):
        await world.prefill.forget_prefixes()
        done = await chat(world, messages, conversation)
        assert done.token_ids == await world.prefill.recompute_chat(messages, ANSWER)
        messages += [
            {"role": "assistant", "content": done.text},
            {"role": "user", "content": world.words(30)},
        ]
    assert done.receipt.pulled_tokens > 900


async def test_decode_takes_the_token_ids_that_prefill_hands_over(world: World) -> None:
    """What decode answers shows that it read them: its own messages are others."""
    messages = [{"role": "user", "content": world.words(120)}]
    asked = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "kvloop_hand_token_ids_over": True,
    }
    handed = (await world.prefill.chat_leg(messages, asked, 1))["kv_transfer_params"]
    others = [{"role": "user", "content": "hello"}]
    reply = await world.decode.chat_leg(others, {**handed, "kvloop_retain": False}, ANSWER)
    expected = await world.prefill.recompute_chat(messages, ANSWER)
    assert tuple(reply["choices"][0]["token_ids"]) == expected


async def test_warm_prefill_pulls_only_what_its_cache_lacks(world: World) -> None:
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    prompt = [*history, *world.tokens(10)]
    done = await generate(world, prompt, conversation)
    receipt = done.receipt
    assert receipt.cached_tokens >= 576
    assert receipt.pulled_tokens == len(history) - 1 - receipt.cached_tokens
    assert receipt.miss_reason is None
    assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)


def _middle_removed(history: list[int]) -> list[int]:
    """Thirty tokens of the answer are gone, as when a client strips reasoning."""
    return history[:630] + history[660:]


def _shorter(history: list[int]) -> list[int]:
    return history[:400]


def _first_token_edited(history: list[int]) -> list[int]:
    return [history[0] ^ 1, *history[1:]]


@pytest.mark.parametrize(
    ("edit", "proven", "miss_reason"),
    [
        (_middle_removed, 608, None),
        (_shorter, 384, None),
        (_first_token_edited, 0, "PREFIX_MISMATCH"),
    ],
)
async def test_history_that_does_not_extend_is_reused_as_far_as_proven(
    world: World, edit, proven, miss_reason
) -> None:
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    prompt = [*edit(history), *world.tokens(25)]
    await world.prefill.forget_prefixes()
    pulled = await world.prefill.pulled_tokens()

    done = await generate(world, prompt, conversation)

    # Random words may agree with the removed ones by chance, never by a block.
    assert done.receipt.proven_tokens == proven
    assert done.receipt.pulled_tokens == proven
    assert await world.prefill.pulled_tokens() - pulled == proven
    assert done.receipt.miss_reason == miss_reason
    assert done.receipt.handle_hit
    assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)


async def test_edited_first_message_of_a_chat_is_exact(world: World) -> None:
    conversation = world.conversation()
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": world.words(200)},
        {"role": "assistant", "content": None},
        {"role": "user", "content": world.words(20)},
    ]
    done = await chat(world, messages[:1], conversation)
    messages[1]["content"] = done.text
    messages[0]["content"] = "edited " + str(messages[0]["content"])
    await world.prefill.forget_prefixes()
    second = await chat(world, messages, conversation)
    assert second.receipt.pulled_tokens == 0
    assert second.receipt.miss_reason == "PREFIX_MISMATCH"
    assert second.token_ids == await world.prefill.recompute_chat(messages, ANSWER)


async def test_one_of_two_simultaneous_turns_pulls_and_both_are_right(world: World) -> None:
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    prompts = [[*history, *world.tokens(30)] for _ in range(2)]
    await world.prefill.forget_prefixes()
    pulled = await world.prefill.pulled_tokens()

    both = await asyncio.gather(*(generate(world, prompt, conversation) for prompt in prompts))

    assert sorted(done.receipt.handle_hit for done in both) == [False, True]
    loser = next(done for done in both if not done.receipt.handle_hit)
    assert loser.receipt.miss_reason == "TAKEN"
    # What the loser took from the winner's pull came through the prefix cache.
    assert loser.receipt.pulled_tokens == 0
    assert await world.prefill.pulled_tokens() - pulled == len(history) - 1
    for prompt, done in zip(prompts, both, strict=True):
        assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)


async def test_turn_sent_again_recomputes_and_is_right(world: World) -> None:
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    prompt = [*history, *world.tokens(30)]
    first = await generate(world, prompt, conversation)
    await world.prefill.forget_prefixes()
    again = await generate(world, prompt, conversation)
    # The retry gets the handle that its first try left behind: the same history.
    assert again.receipt.handle_hit
    assert again.token_ids == first.token_ids


async def test_answer_that_ends_at_a_stop_string_is_retained(world: World) -> None:
    """vLLM's front end aborts such a request, and its scheduler would drop the blocks."""
    conversation = world.conversation()
    prompt = world.tokens(300)
    whole = await generate(world, prompt, world.conversation())
    stop = whole.text[len(whole.text) // 2 :][:12]

    stopped = await world.client.generate(
        prompt,
        model=MODEL,
        conversation_id=conversation,
        max_tokens=ANSWER,
        temperature=0,
        extra_body={"return_token_ids": True, "stop": [stop]},
    ).collect()

    assert stopped.finish_reason == "stop"
    assert stop not in stopped.text
    assert len(stopped.token_ids) < ANSWER
    assert stopped.receipt.retain_outcome == "RETAINED"
    follow_up = [*prompt, *stopped.token_ids, *world.tokens(30)]
    await world.prefill.forget_prefixes()
    done = await generate(world, follow_up, conversation)
    assert done.receipt.handle_hit
    assert done.receipt.pulled_tokens >= len(prompt)
    assert done.token_ids == await world.prefill.recompute_prompt(follow_up, ANSWER)


async def test_cancelled_answer_leaves_nothing_behind(world: World) -> None:
    before = await world.decode.kv_usage()
    stream = world.client.generate(
        world.tokens(300), model=MODEL, conversation_id=world.conversation(), max_tokens=2000
    )
    async with stream:
        async for _ in stream:
            break

    async def is_freed() -> bool:
        return await world.decode.kv_usage() <= before

    await eventually(is_freed, "the blocks of the broken-off answer are free")


async def test_few_tokens_are_recomputed(world: World) -> None:
    conversation = world.conversation()
    prompt = world.tokens(300)
    done = await world.client.generate(
        prompt,
        model=MODEL,
        conversation_id=conversation,
        max_tokens=20,
        temperature=0,
        extra_body={"return_token_ids": True},
    ).collect()
    follow_up = [*prompt, *done.token_ids, *world.tokens(5)]
    second = await generate(world, follow_up, conversation)
    assert second.receipt.handle_hit
    assert second.receipt.miss_reason == "BELOW_THRESHOLD"
    assert second.receipt.pulled_tokens == 0
    assert second.token_ids == await world.prefill.recompute_prompt(follow_up, ANSWER)


async def test_nothing_is_retained_without_a_conversation_or_with_reuse_disabled(
    world: World,
) -> None:
    before = await world.decode.kv_usage()
    prompt = world.tokens(200)
    cases: list[dict[str, Any]] = [
        {},
        {"conversation_id": world.conversation(), "disable_reuse": True},
    ]
    for options in cases:
        done = await world.client.generate(
            prompt, model=MODEL, max_tokens=10, temperature=0, **options
        ).collect()
        assert done.receipt.retain_outcome == "NOT_REQUESTED"
        assert done.receipt.miss_reason in ("NO_CONVERSATION", "REUSE_DISABLED")

    async def nothing_more() -> bool:
        return await world.decode.kv_usage() <= before

    await eventually(nothing_more, "no block is kept")


async def test_cache_salts_of_turns_must_agree(world: World) -> None:
    """Equal tokens under another salt are another tenant's: nothing is proven."""
    conversation = world.conversation()
    prompt = world.tokens(300)

    async def turn(prompt: Sequence[int], salt: str) -> Completion:
        return await world.client.generate(
            list(prompt),
            model=MODEL,
            conversation_id=conversation,
            max_tokens=ANSWER,
            temperature=0,
            extra_body={"return_token_ids": True, "cache_salt": salt},
        ).collect()

    first = await turn(prompt, "tenant-a")
    second_prompt = [*prompt, *first.token_ids, *world.tokens(5)]
    second = await turn(second_prompt, "tenant-a")
    assert second.receipt.pulled_tokens > 0
    third_prompt = [*second_prompt, *second.token_ids, *world.tokens(5)]
    third = await turn(third_prompt, "tenant-b")
    assert third.receipt.handle_hit
    assert (third.receipt.proven_tokens, third.receipt.miss_reason) == (0, "PREFIX_MISMATCH")
    assert third.token_ids == await world.prefill.recompute_prompt(third_prompt, ANSWER)


async def test_ended_conversation_frees_decode_memory_and_misses(world: World) -> None:
    conversation = world.conversation()
    # Large, so that no other conversation's end can be mistaken for it.
    history = await first_turn(world, conversation, count=6000)
    held = await world.decode.kv_usage()
    ended = await world.client.end_conversation(conversation, model=MODEL)
    assert ended.found
    assert ended.released

    async def freed() -> bool:
        return (held - await world.decode.kv_usage()) * NUM_BLOCKS >= 6000 // 32

    await eventually(freed, "the ended conversation's blocks are freed", seconds=2)
    done = await generate(world, [*history, *world.tokens(5)], conversation)
    assert done.receipt.miss_reason == "RELEASED"
    assert not done.receipt.handle_hit


async def test_refused_request_keeps_the_handle(world: World) -> None:
    """What the engine never admitted cannot have used the handle."""
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    with pytest.raises(KvloopError) as refused:
        await world.client.generate(
            [*history, *world.tokens(5)],
            model=MODEL,
            conversation_id=conversation,
            max_tokens=ANSWER,
            extra_body={"response_format": {"type": "no such format"}},
        ).collect()
    assert refused.value.reason in ("INVALID_FIELD", "ENGINE_REJECTED")
    done = await generate(world, [*history, *world.tokens(5)], conversation)
    assert done.receipt.handle_hit
