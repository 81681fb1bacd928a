"""Two turns over raw HTTP, as a router would run them on real vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.flow.sim.engines import FIRST_PREFILL, EngineClient, engine, prompt
from tests.flow.sim.jump_clock import JumpClock


async def _turn(
    prefill: EngineClient,
    decode: EngineClient,
    tokens: list[int],
    handle: dict[str, Any] | None = None,
    max_tokens: int = 100,
) -> tuple[dict[str, Any], list[int], dict[str, Any]]:
    """Prefill's params, the answer, and the handle that it leaves behind."""
    handed = await prefill.complete(
        tokens, max_tokens=1, kv_transfer_params=handle or FIRST_PREFILL
    )
    params = handed.json["kv_transfer_params"]
    answer = await decode.complete(
        tokens,
        max_tokens=max_tokens,
        kv_transfer_params=params | {"kvloop_turn_id": "turn"},
    )
    return params, answer.choice["token_ids"], answer.json["kv_transfer_params"]


async def _right(referee: EngineClient, tokens: list[int], count: int = 100) -> list[int]:
    answer = await referee.complete(tokens, max_tokens=count)
    ids: list[int] = answer.choice["token_ids"]
    return ids


async def test_the_second_turn_pulls_back_and_equals_a_recompute(
    prefill: EngineClient, decode: EngineClient, referee: EngineClient
) -> None:
    tokens = prompt(500)
    _, answer, handle = await _turn(prefill, decode, tokens)
    assert answer == await _right(referee, tokens)
    assert handle["do_remote_decode"] is True
    assert handle["remote_num_tokens"] == 599
    assert len(handle["remote_block_ids"][0]) == 38
    history = [*tokens, *answer, *prompt(20, seed=1)]
    params, second, _ = await _turn(prefill, decode, history, handle)
    assert second == await _right(referee, history)
    assert params["kvloop_report"]["cached_tokens"] == 496
    assert params["kvloop_report"]["pulled_tokens"] == 103
    assert await prefill.metric("vllm:external_prefix_cache_hits_total") == 103
    assert await prefill.metric("vllm:nixl_bytes_transferred_count") == 1
    # Decode pulled the first turn's prompt and the second's tail.
    assert await decode.metric("vllm:nixl_xfer_time_seconds_count") == 2
    assert (await prefill.state())["pins"] == []


async def test_a_handle_used_twice_gives_another_text(
    prefill: EngineClient, decode: EngineClient, referee: EngineClient
) -> None:
    tokens = prompt(500)
    _, answer, handle = await _turn(prefill, decode, tokens)
    history = [*tokens, *answer, 7]
    right = await _right(referee, history, 1)
    assert (await decode.state())["blocks"]["pinned"] == 38
    for expected in (True, False):
        async with engine(role="prefill") as other:
            handed = await other.complete(history, max_tokens=1, kv_transfer_params=handle)
            assert handed.status == 200
            assert (handed.choice["token_ids"] == right) is expected
    assert await decode.metric("vllm:nixl_num_notifications_after_expiry_total") == 1


async def test_two_turns_at_once_with_one_handle_differ_in_who_is_right(
    decode: EngineClient, referee: EngineClient
) -> None:
    tokens = prompt(500)
    clock = JumpClock()
    async with engine(role="prefill") as fast, engine(role="prefill", clock=clock) as slow:
        _, answer, handle = await _turn(fast, decode, tokens)
        history = [*tokens, *answer, 7]
        right = await _right(referee, history, 1)
        await slow.post("/sim/faults", {"kind": "slow_transfer", "seconds": 60})

        async def ask(client: EngineClient) -> bool:
            reply = await client.complete(history, max_tokens=1, kv_transfer_params=handle)
            return bool(reply.choice["token_ids"] == right)

        async with asyncio.TaskGroup() as group:
            second = group.create_task(ask(slow))
            await slow.until(lambda state: len(state["loading"]) == 1)
            assert await ask(fast)
            await clock.advance(60)
    assert not second.result()


async def test_stock_answers_an_edited_history_wrongly_and_says_200(
    referee: EngineClient,
) -> None:
    tokens = prompt(500)
    async with (
        engine(role="prefill", stock=True) as prefill,
        engine(role="decode", stock=True) as decode,
    ):
        _, answer, handle = await _turn(prefill, decode, tokens)
        assert "kvloop_proof" not in handle
        history = [*tokens, *answer[:30], *answer[60:], *prompt(20, seed=1)]
        params, second, _ = await _turn(prefill, decode, history, handle)
    assert "kvloop_report" not in params
    assert second != await _right(referee, history)


async def test_kvloop_answers_the_same_history_rightly(
    prefill: EngineClient, decode: EngineClient, referee: EngineClient
) -> None:
    tokens = prompt(500)
    _, answer, handle = await _turn(prefill, decode, tokens)
    history = [*tokens, *answer[:30], *answer[60:], *prompt(20, seed=1)]
    params, second, _ = await _turn(prefill, decode, history, handle)
    assert second == await _right(referee, history)
    assert params["kvloop_report"]["proven_tokens"] == 512


async def test_a_pin_falls_at_its_time(prefill: EngineClient, referee: EngineClient) -> None:
    tokens = prompt(500)
    clock = JumpClock()
    async with engine(role="decode", clock=clock, pin_lease_seconds=480) as decode:
        _, answer, handle = await _turn(prefill, decode, tokens)
        (pin,) = (await decode.state())["pins"]
        assert pin["request_id"] == handle["remote_request_id"]
        assert pin["expires_in_seconds"] == pytest.approx(480, abs=20)
        await clock.advance(440)
        assert await decode.metric("vllm:kv_cache_usage_perc") > 0
        await clock.advance(40)
        assert await decode.metric("vllm:kv_cache_usage_perc") == 0
        assert await decode.metric("vllm:nixl_num_kv_expired_reqs_total") == 1
        assert (await decode.state())["pins"] == []
        async with engine(role="prefill") as other:
            params, second, _ = await _turn(other, decode, [*tokens, *answer, 7], handle)
    assert params["kvloop_report"]["miss_reason"] == "ENGINE_EXPIRED"
    assert second == await _right(referee, [*tokens, *answer, 7])


async def test_a_decode_engine_that_was_restarted_costs_a_recompute(
    prefill: EngineClient, decode: EngineClient, referee: EngineClient
) -> None:
    tokens = prompt(500)
    _, answer, handle = await _turn(prefill, decode, tokens)
    before = await decode.state()
    await decode.post("/sim/engine", {"action": "restart"})
    after = await decode.next_life(before)
    assert after["engine_id"] != before["engine_id"]
    assert after["epoch"] != before["epoch"]
    assert after["blocks"]["used"] == 0
    history = [*tokens, *answer, 7]
    params, second, _ = await _turn(prefill, decode, history, handle)
    assert params["kvloop_report"]["miss_reason"] == "PULL_FAILED"
    assert second == await _right(referee, history)


@pytest.mark.parametrize(("version", "carried"), [("0.32.0", False), ("0.33.0", True)])
async def test_streams_carry_the_handle_only_in_newer_versions(
    prefill: EngineClient, version: str, carried: bool
) -> None:
    tokens = prompt(100)
    handed = await prefill.complete(tokens, max_tokens=1, kv_transfer_params=FIRST_PREFILL)
    async with engine(role="decode", vllm_version=version) as decode:
        params = handed.json["kv_transfer_params"] | {"kvloop_turn_id": "turn"}
        body = {"prompt": tokens, "max_tokens": 5, "kv_transfer_params": params}
        *chunks, done = await decode.stream("/v1/completions", body)
    assert done == "[DONE]"
    found = [chunk.get("kv_transfer_params") for chunk in chunks]
    assert [params is not None for params in found] == [False] * 4 + [carried]


async def test_a_refused_request_frees_prefills_blocks(
    prefill: EngineClient, decode: EngineClient
) -> None:
    tokens = prompt(100)
    handed = await prefill.complete(tokens, max_tokens=1, kv_transfer_params=FIRST_PREFILL)
    params = handed.json["kv_transfer_params"]
    refused = await decode.complete(tokens, max_tokens=5, temperature=-1, kv_transfer_params=params)
    assert refused.status == 400
    await prefill.until(lambda state: state["pins"] == [])


async def test_a_chat_continues_on_the_same_tokens(
    prefill: EngineClient, decode: EngineClient
) -> None:
    """Text that goes out and comes back in the history is the same KV."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "tell me a long story " * 30}]
    body = {"messages": messages, "max_tokens": 100}
    handle: dict[str, Any] = FIRST_PREFILL
    retained = 0
    for turn in range(3):
        prefill_body = body | {"max_tokens": 1, "kv_transfer_params": handle}
        handed = await prefill.post("/v1/chat/completions", prefill_body)
        params = handed.json["kv_transfer_params"]
        report = params["kvloop_report"]
        if turn:
            assert report["proven_tokens"] == retained
        params |= {"kvloop_turn_id": str(turn)}
        answer = await decode.post("/v1/chat/completions", body | {"kv_transfer_params": params})
        handle = answer.json["kv_transfer_params"]
        retained = handle["remote_num_tokens"]
        messages += [answer.choice["message"], {"role": "user", "content": "and then?"}]
