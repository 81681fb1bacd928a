"""The HTTP surface: what vLLM's clients rely on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.flow.sim.engines import CHAT, COMPLETIONS, MODEL, EngineClient, engine, prompt

_MESSAGES = [{"role": "user", "content": "Say something nice."}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


async def test_models_say_how_long_prompts_may_be(prefill: EngineClient) -> None:
    reply = await prefill.get("/v1/models")
    (card,) = reply.json["data"]
    assert (card["id"], card["max_model_len"], card["parent"]) == (MODEL, 32_768, None)


async def test_a_chat_in_one_piece(prefill: EngineClient) -> None:
    reply = await prefill.post(CHAT, {"model": MODEL, "messages": _MESSAGES, "max_tokens": 7})
    assert reply.status == 200
    assert reply.json["object"] == "chat.completion"
    assert reply.choice["message"]["role"] == "assistant"
    assert len(reply.choice["message"]["content"].split()) > 3
    assert (reply.choice["finish_reason"], reply.choice["stop_reason"]) == ("length", None)
    usage = reply.json["usage"]
    assert usage["completion_tokens"] == 7
    assert usage["total_tokens"] == usage["prompt_tokens"] + 7
    assert reply.json["kv_transfer_params"] is None


async def test_a_streamed_chat_is_the_same_as_in_one_piece(prefill: EngineClient) -> None:
    body = {"messages": _MESSAGES, "max_tokens": 20}
    whole = await prefill.post(CHAT, body)
    opening, *chunks, last, usage, done = await prefill.stream(
        CHAT, body | {"stream_options": {"include_usage": True}}
    )
    assert done == "[DONE]"
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0] for chunk in [*chunks, last]]
    assert len(deltas) == 20
    text = "".join(delta["delta"]["content"] for delta in deltas)
    assert text == whole.choice["message"]["content"]
    assert [delta["finish_reason"] for delta in deltas] == [None] * 19 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 20
    assert "usage" not in last


async def test_a_stream_without_include_usage_has_no_usage(prefill: EngineClient) -> None:
    *chunks, done = await prefill.stream(COMPLETIONS, {"prompt": "hi", "max_tokens": 3})
    assert done == "[DONE]"
    assert len(chunks) == 3
    assert not any("usage" in chunk for chunk in chunks)


async def test_usage_in_every_chunk_if_asked_for(prefill: EngineClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = await prefill.stream(
        COMPLETIONS, {"prompt": "hi", "max_tokens": 3, "stream_options": options}
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_answers_end_by_themselves(prefill: EngineClient) -> None:
    async with engine(answer_tokens=8) as brief:
        reply = await brief.post(CHAT, {"messages": _MESSAGES, "return_token_ids": True})
    assert reply.choice["finish_reason"] == "stop"
    assert len(reply.choice["token_ids"]) == reply.json["usage"]["completion_tokens"]
    assert reply.json["prompt_token_ids"][0] == reply.choice["token_ids"][-1] - 1


async def test_several_choices_differ_and_share_one_prompt(prefill: EngineClient) -> None:
    body = {"prompt": "once upon a time", "n": 3, "max_tokens": 10, "temperature": 1}
    reply = await prefill.post(COMPLETIONS, body)
    texts = {choice["text"] for choice in reply.json["choices"]}
    assert len(texts) == 3
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2]
    assert reply.json["usage"]["completion_tokens"] == 30
    chunks = (await prefill.stream(COMPLETIONS, body))[:-1]
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert set(streamed) == texts


async def test_a_seed_gives_another_answer_and_the_same_again(prefill: EngineClient) -> None:
    replies = [await prefill.complete("hello", max_tokens=10, seed=seed) for seed in (1, 1, 2)]
    first, same, other = (reply.choice["text"] for reply in replies)
    assert first == same != other


async def test_several_prompts_in_one_request(prefill: EngineClient) -> None:
    reply = await prefill.complete(["one", "two"], max_tokens=4)
    alone = await prefill.complete("two", max_tokens=4)
    assert reply.json["choices"][1]["text"] == alone.choice["text"]
    assert reply.json["usage"]["prompt_tokens"] == 2


async def test_text_and_its_token_ids_are_the_same_prompt(prefill: EngineClient) -> None:
    text = "你好 world, once more"
    tokens = (await prefill.post("/tokenize", {"prompt": text})).json["tokens"]
    assert (await prefill.post("/detokenize", {"tokens": tokens})).json == {"prompt": text}
    answers = [(await prefill.complete(p, max_tokens=9)).choice["text"] for p in (text, tokens)]
    assert answers[0] == answers[1]


async def test_tokenize_counts_a_chat_as_the_chat_endpoint_does(prefill: EngineClient) -> None:
    counted = await prefill.post("/tokenize", {"messages": _MESSAGES, "return_token_strs": True})
    reply = await prefill.post(CHAT, {"messages": _MESSAGES, "max_tokens": 1})
    assert counted.json["count"] == reply.json["usage"]["prompt_tokens"]
    assert counted.json["max_model_len"] == 32_768
    assert counted.json["token_strs"][0] == "<|im_start|>"


async def test_a_stop_string_ends_the_answer(prefill: EngineClient) -> None:
    free = (await prefill.complete("hello", max_tokens=30)).choice["text"]
    word = free.split()[12]
    body = {"prompt": "hello", "max_tokens": 30, "stop": [word]}
    reply = await prefill.post(COMPLETIONS, body)
    assert (reply.choice["finish_reason"], reply.choice["stop_reason"]) == ("stop", word)
    assert reply.choice["text"] == free[: free.index(word)]
    chunks = (await prefill.stream(COMPLETIONS, body))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == reply.choice["text"]
    await prefill.until(lambda state: state["running"] == [])


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "look_up"}}, "stop")],
)
async def test_a_tool_is_called_when_demanded(
    prefill: EngineClient, choice: object, reason: str
) -> None:
    body = {"messages": _MESSAGES, "tools": [_TOOL], "tool_choice": choice}
    whole = await prefill.post(CHAT, body)
    (call,) = whole.choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert isinstance(json.loads(call["function"]["arguments"])["word"], str)
    assert whole.choice["finish_reason"] == reason
    chunks = (await prefill.stream(CHAT, body))[1:-1]
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "look_up"
    arguments = "".join(piece["function"]["arguments"] for piece in calls)
    assert arguments == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


async def test_logprobs_in_both_forms(prefill: EngineClient) -> None:
    chat = await prefill.post(
        CHAT, {"messages": _MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 3}
    )
    (first, _) = chat.choice["logprobs"]["content"]
    assert first["token"] == first["top_logprobs"][0]["token"]
    assert len({top["token"] for top in first["top_logprobs"]}) == 3
    assert first["logprob"] >= first["top_logprobs"][1]["logprob"]
    completion = await prefill.complete("hi", max_tokens=3, logprobs=2)
    logprobs = completion.choice["logprobs"]
    assert "".join(logprobs["tokens"]) == completion.choice["text"]
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]


async def test_echo_repeats_the_prompt(prefill: EngineClient) -> None:
    reply = await prefill.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 2, "echo": True})
    assert reply.choice["text"].startswith("hello ")


async def test_cached_tokens_are_told_if_switched_on() -> None:
    async with engine(enable_prompt_tokens_details=True) as telling:
        await telling.complete(prompt(100), max_tokens=1)
        reply = await telling.complete(prompt(100), max_tokens=1)
        assert reply.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
        assert (await telling.post("/reset_prefix_cache")).json == {"success": True}
        reply = await telling.complete(prompt(100), max_tokens=1)
        assert reply.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_the_client_may_name_the_request(prefill: EngineClient) -> None:
    headers = {"X-Request-Id": "mine"}
    reply = await prefill.post(CHAT, {"messages": _MESSAGES, "max_tokens": 1}, headers)
    assert reply.json["id"] == "chatcmpl-mine"


@pytest.mark.parametrize(
    ("path", "body", "status", "type_", "param"),
    [
        (CHAT, {"model": "other", "messages": _MESSAGES}, 404, "NotFoundError", "model"),
        (CHAT, {"model": MODEL}, 400, "Bad Request", "body.messages"),
        (CHAT, {"messages": "hi"}, 400, "Bad Request", "body.messages"),
        (CHAT, {"messages": []}, 400, "BadRequestError", None),
        (CHAT, {"messages": _MESSAGES, "max_tokens": -1}, 400, "BadRequestError", "max_tokens"),
        (COMPLETIONS, {"prompt": ""}, 400, "Bad Request", "prompt"),
        (COMPLETIONS, {"prompt": [1] * 40_000}, 400, "BadRequestError", "input_tokens"),
        (COMPLETIONS, {"prompt": [1] * 32_768}, 400, "BadRequestError", "max_tokens"),
        (COMPLETIONS, {"prompt": [10**6]}, 400, "BadRequestError", None),
        ("/tokenize", {"model": "other", "prompt": "hi"}, 404, "NotFoundError", "model"),
        ("/nowhere", {}, 404, "Not Found", None),
    ],
)
async def test_errors_have_vllms_body(
    prefill: EngineClient,
    path: str,
    body: dict[str, Any],
    status: int,
    type_: str,
    param: str | None,
) -> None:
    reply = await prefill.post(path, body)
    assert reply.status == status
    assert reply.error["code"] == status
    assert (reply.error["type"], reply.error["param"]) == (type_, param)
    assert reply.error["message"]


async def test_a_body_that_is_not_json_is_refused(prefill: EngineClient) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(prefill.url + CHAT, data=b"messages=hi") as reply,
    ):
        assert reply.status == 400
        assert "Unsupported Media Type" in (await reply.json())["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(stream: bool) -> None:
    async with engine(preset="tiny-cpu") as slow:
        body = {"prompt": "hi", "max_tokens": 5000, "ignore_eos": True, "stream": stream}

        async def ask() -> None:
            async with aiohttp.ClientSession() as session:
                async with session.post(slow.url + COMPLETIONS, json=body) as reply:
                    await reply.read()

        asking = asyncio.create_task(ask())
        await slow.until(lambda state: len(state["running"]) == 1)
        asking.cancel()
        state = await slow.until(lambda state: state["running"] == [])
        assert state["blocks"]["used"] == 0
        assert await slow.metric("vllm:request_success_total") == 1
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_waiting_request_is_aborted_too() -> None:
    async with engine(preset="tiny-cpu", max_num_seqs=1) as slow:
        body = {"prompt": "hi", "max_tokens": 5000, "ignore_eos": True}
        first = asyncio.create_task(_first_event(slow, body))
        await slow.until(lambda state: len(state["running"]) == 1)
        second = asyncio.create_task(_first_event(slow, body))
        await slow.until(lambda state: len(state["waiting"]) == 1)
        assert await slow.metric("vllm:num_requests_waiting") == 1
        second.cancel()
        await slow.until(lambda state: state["waiting"] == [])
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def _first_event(client: EngineClient, body: dict[str, Any]) -> None:
    async for _ in client.events(COMPLETIONS, body):
        pass


async def test_metrics_count_what_was_done(prefill: EngineClient) -> None:
    await prefill.complete(prompt(100), max_tokens=10)
    await prefill.complete(prompt(100), max_tokens=10)
    expected = {
        "vllm:prompt_tokens_total": 200,
        "vllm:generation_tokens_total": 20,
        "vllm:prefix_cache_queries_total": 200,
        "vllm:prefix_cache_hits_total": 96,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 18,
        "vllm:request_prompt_tokens_sum": 200,
        "vllm:num_requests_running": 0,
    }
    assert {name: await prefill.metric(name) for name in expected} == expected


async def test_health_and_version(prefill: EngineClient) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(prefill.url + "/health") as reply:
            assert (reply.status, await reply.read()) == (200, b"")
    assert (await prefill.get("/version")).json == {"version": "0.32.0"}
