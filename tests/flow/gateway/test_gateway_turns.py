"""Turns through the gateway: which engine does what, by FAULTS row."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.flow.gateway.fleet import COMPLETIONS, PREAMBLE, Fleet, fleet
from tests.flow.sim.engines import MODEL

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as running:
        yield running


async def test_B1_what_only_decode_would_refuse_is_refused_before_prefill(stack: Fleet) -> None:
    for members in (
        {"stream_options": {"include_usage": True}},
        {"n": 0},
        {"min_tokens": 9, "max_tokens": 5},
        {"logprobs": "many"},
        {"stop": [""]},
        {"max_completion_tokens": 0},
    ):
        reply = await stack.chat(HI, **members)
        assert reply.status == 400, members
        assert reply.error["type"] == "BadRequestError"
        assert reply.error["param"].partition("[")[0] in members
    assert (await stack.prefill.state())["running"] == []
    assert await stack.prefill.metric("vllm:request_success_total") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_B9_B10_several_choices_run_on_decode_alone_and_pin_nothing(
    stack: Fleet, stream: bool
) -> None:
    reply = await stack.chat(HI, n=3, stream=stream, max_tokens=5)
    if stream:
        indexes = {c["index"] for event in reply.events for c in event["choices"]}
    else:
        indexes = {choice["index"] for choice in reply.json["choices"]}
        assert reply.headers["x-kvloop-miss-reason"] == "UNSUPPORTED"
        assert reply.json["usage"]["completion_tokens"] == 15
    assert indexes == {0, 1, 2}
    assert await stack.prefill.metric("vllm:request_success_total") == 0
    await stack.decode.until(lambda state: state["pins"] == [])


async def test_C8_prompt_logprobs_and_echo_are_answered_and_the_engine_lives(stack: Fleet) -> None:
    for members in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, **members}
        assert (await stack.post(COMPLETIONS, body)).status == 200
    assert (await stack.chat(HI, max_tokens=2)).status == 200
    assert await stack.prefill.metric("vllm:request_success_total") == 1


async def test_D9_no_internal_member_reaches_a_client_in_any_turn(stack: Fleet) -> None:
    history = [{"role": "user", "content": PREAMBLE}]
    for stream in (False, True, False):
        reply = await stack.chat(history, {"x-conversation-id": "c"}, stream=stream, max_tokens=40)
        for internal in (b"kv_transfer_params", b"remote_", b"kvloop", b"127.0.0.1"):
            assert internal not in reply.raw
        history += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]


@pytest.mark.parametrize("version", ["0.21.0", "0.32.0", "0.33.0"])
async def test_D2_D3_C9_a_streamed_turn_leaves_a_handle_and_the_next_one_pulls(
    tmp_path: Path, version: str
) -> None:
    """Whether or not engines send params in streams; shown by their counters."""
    async with fleet(tmp_path, sim={"vllm_version": version}) as stack:
        await _two_turns(stack)


async def test_E3_all_of_it_works_on_ipv6(tmp_path: Path) -> None:
    async with fleet(tmp_path, host="[::1]") as stack:
        await _two_turns(stack)


async def _two_turns(stack: Fleet) -> None:
    history = [{"role": "user", "content": PREAMBLE}]
    reply = await stack.chat(history, {"x-session-id": "s"}, stream=True, max_tokens=100)
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in reply.events)
    history += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    reply = await stack.chat(history, {"x-session-id": "s"}, max_tokens=5)
    assert int(reply.headers["x-kvloop-pulled-tokens"]) >= 96
    assert await stack.prefill.metric("vllm:external_prefix_cache_hits_total") >= 96
    assert reply.headers["x-kvloop-handle-hit"] == "true"
    assert int(reply.headers["x-kvloop-recomputed-tokens"]) < 40


async def test_C9_decode_computes_no_prompt_that_was_handed_over(stack: Fleet) -> None:
    await stack.chat([{"role": "user", "content": PREAMBLE}], max_tokens=5)
    prompt = await stack.decode.metric("vllm:prompt_tokens_total")
    assert prompt > 100
    assert await stack.decode.metric("vllm:external_prefix_cache_hits_total") >= prompt - 1


async def test_cached_tokens_in_usage_are_what_was_not_computed(tmp_path: Path) -> None:
    async with fleet(tmp_path) as stack:
        for stream in (False, True):
            more: dict[str, Any] = {"stream": stream}
            if stream:
                more["stream_options"] = {"include_usage": True}
            reply = await stack.chat([{"role": "user", "content": PREAMBLE}], max_tokens=3, **more)
            usage = (reply.events[-1] if stream else reply.json)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 100) is stream  # in P's cache at the second time
