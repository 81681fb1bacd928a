"""Both clients against a router of scripted answers."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from kvloop import AsyncClient, Client, EndedConversation, Message, ModelInfo, ToolCall
from kvloop.errors import (
    DeadlineError,
    InternalError,
    InvalidFieldError,
    ModelNotFoundError,
    UnavailableError,
)
from kvloop.router.v1 import router_pb2
from tests.unit.client.fake_router import FakeRouter, chat_chunk, serve_router, turn_result

HELLO = [{"role": "user", "content": "hello"}]


async def test_chunks_come_as_the_engine_wrote_them_and_the_receipt_at_the_end(
    client: Any, router: FakeRouter
) -> None:
    router.chunks = [
        chat_chunk("", role="assistant"),
        chat_chunk("Hel"),
        chat_chunk("lo", finish_reason="stop"),
    ]
    router.result = turn_result(pulled=64, recomputed=36, turn=2, miss=None)
    answer = client.chat(HELLO, model="m")
    chunks = [chunk async for chunk in answer]
    assert [chunk.text for chunk in chunks] == ["", "Hel", "lo"]
    assert b'"logprobs"' in chunks[0].json
    done = await answer.collect()
    assert (done.text, done.finish_reason) == ("Hello", "stop")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (100, 2)
    assert done.client_request_id == "mine"
    receipt = done.receipt
    assert (receipt.turn, receipt.handle_hit, receipt.miss_reason) == (2, True, None)
    assert (receipt.proven_tokens, receipt.pulled_tokens, receipt.recomputed_tokens) == (64, 64, 36)
    assert (receipt.ttft_seconds, receipt.prefill_leg_seconds) == (0.25, 0.2)
    assert (receipt.retain_outcome, receipt.retained_tokens) == ("RETAINED", 101)
    assert receipt.retained_ttl_seconds == 470


async def test_chunks_of_a_batch_come_one_by_one(client: Any, router: FakeRouter) -> None:
    router.chunks = [chat_chunk(text) for text in ("a", "b", "c", "d", "e")]
    router.together = 3
    answer = client.chat(HELLO, model="m")
    assert [chunk.text async for chunk in answer] == ["a", "b", "c", "d", "e"]
    assert (await answer.collect()).text == "abcde"
    assert router.requests[0].accept_batches


async def test_the_last_batch_may_bring_the_result(client: Any, router: FakeRouter) -> None:
    router.chunks = [chat_chunk(text) for text in ("a", "b", "c")]
    router.together = 2
    router.result = turn_result(turn=7)
    router.result_in_batch = True
    answer = client.chat(HELLO, model="m")
    assert [chunk.text async for chunk in answer] == ["a", "b", "c"]
    done = await answer.collect()
    assert (done.text, done.receipt.turn) == ("abc", 7)
    assert [chunk.text async for chunk in answer] == []


async def test_a_closed_answer_gives_no_more_chunks(client: Any, router: FakeRouter) -> None:
    router.chunks = [chat_chunk(text) for text in ("a", "b", "c")]
    router.together = 3
    answer = client.chat(HELLO, model="m")
    assert (await anext(aiter(answer))).text == "a"
    answer.close()
    assert [chunk async for chunk in answer] == []


async def test_miss_reason_is_a_plain_name(client: Any, router: FakeRouter) -> None:
    router.result = turn_result(miss="EXPIRED")
    done = await client.chat(HELLO, model="m").collect()
    assert done.receipt.miss_reason == "EXPIRED"


async def test_reason_newer_than_the_client_is_its_number(client: Any, router: FakeRouter) -> None:
    result = turn_result()
    result.receipt.miss_reason = 999  # type: ignore[assignment]
    router.result = result
    done = await client.chat(HELLO, model="m").collect()
    assert done.receipt.miss_reason == "999"


async def test_tool_call_is_put_together_from_its_parts(client: Any, router: FakeRouter) -> None:
    router.chunks = [
        chat_chunk(
            tool_calls=[{"index": 0, "id": "a", "function": {"name": "add", "arguments": '{"x"'}}]
        ),
        chat_chunk(
            tool_calls=[{"index": 1, "id": "b", "function": {"name": "sub", "arguments": "{}"}}]
        ),
        chat_chunk(
            tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}],
            finish_reason="tool_calls",
        ),
    ]
    done = await client.chat(HELLO, model="m").collect()
    calls = (ToolCall("a", "add", '{"x": 1}'), ToolCall("b", "sub", "{}"))
    assert done.tool_calls == calls
    assert done.finish_reason == "tool_calls"
    assert done.message == Message("assistant", content=None, tool_calls=calls)


async def test_reasoning_is_kept_apart_and_left_out_of_history(
    client: Any, router: FakeRouter
) -> None:
    router.chunks = [
        chat_chunk(reasoning_content="hm"),
        chat_chunk(reasoning="m"),
        chat_chunk("42"),
    ]
    done = await client.chat(HELLO, model="m").collect()
    assert (done.choices[0].reasoning, done.text) == ("hmm", "42")
    assert done.message == Message("assistant", content="42")


async def test_completion_chunks_with_token_ids(client: Any, router: FakeRouter) -> None:
    router.chunks = [
        {"choices": [{"index": 0, "text": "a", "token_ids": [7], "prompt_token_ids": [1, 2]}]},
        {"choices": [{"index": 0, "text": "b", "token_ids": [8, 9], "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 2}},
    ]
    done = await client.generate([1, 2], model="m").collect()
    assert (done.text, done.token_ids, done.finish_reason) == ("ab", (7, 8, 9), "length")
    assert done.prompt_token_ids == (1, 2)


async def test_several_choices_are_kept_apart(client: Any, router: FakeRouter) -> None:
    router.chunks = [
        {"choices": [{"index": 1, "text": "second"}]},
        {"choices": [{"index": 0, "text": "first"}]},
    ]
    done = await client.generate("p", model="m").collect()
    assert [choice.text for choice in done.choices] == ["first", "second"]


async def test_request_carries_everything_that_was_given(client: Any, router: FakeRouter) -> None:
    await client.chat(
        HELLO,
        model="m",
        conversation_id="c",
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="auto",
        extra_body={"logprobs": True},
        client_request_id="mine",
        disable_reuse=True,
        max_tokens=5,
        temperature=0,
        stop="x",
        top_p=None,
    ).collect()
    (request,) = router.requests
    assert request == router_pb2.ChatRequest(
        model="m",
        messages=[router_pb2.ChatMessage(role="user", content="hello")],
        conversation_id="c",
        sampling=router_pb2.SamplingParams(max_tokens=5, temperature=0, stop=["x"]),
        tools=[router_pb2.Tool(name="f")],
        tool_choice_json=b'"auto"',
        extra_body_json=b'{"logprobs":true}',
        client_request_id="mine",
        disable_reuse=True,
        accept_batches=True,
    )


async def test_text_and_token_prompts_use_their_own_fields(client: Any, router: FakeRouter) -> None:
    await client.generate("text", model="m").collect()
    await client.generate([3, 4], model="m").collect()
    await client.generate([], model="m").collect()
    text, ids, empty = router.requests
    assert text.text == "text"
    assert list(ids.token_ids.ids) == [3, 4]
    assert empty.WhichOneof("prompt") == "token_ids"


async def test_error_before_the_first_chunk_has_its_class(client: Any, router: FakeRouter) -> None:
    router.error = ModelNotFoundError("no worker serves 'm'", model="m")
    with pytest.raises(ModelNotFoundError) as caught:
        await client.chat(HELLO, model="m").collect()
    assert caught.value.metadata == {"model": "m"}


async def test_error_after_a_chunk_leaves_the_chunk(client: Any, router: FakeRouter) -> None:
    router.chunks = [chat_chunk("part")]
    router.error = UnavailableError("decode worker went away")
    chunks = aiter(client.chat(HELLO, model="m"))
    assert (await anext(chunks)).text == "part"
    with pytest.raises(UnavailableError, match="went away"):
        await anext(chunks)


async def test_stream_without_a_result_is_a_defect(client: Any, router: FakeRouter) -> None:
    router.result = None
    with pytest.raises(InternalError, match="without a result"):
        await client.chat(HELLO, model="m").collect()


async def test_chunk_that_is_not_json_is_a_defect(client: Any, router: FakeRouter) -> None:
    router.chunks = [{"choices": "none"}]
    with pytest.raises(InternalError, match="cannot be read"):
        await client.chat(HELLO, model="m").collect()


async def test_close_cancels_the_call(client: Any, router: FakeRouter) -> None:
    router.chunks, router.hang = [chat_chunk("a")], True
    answer = client.chat(HELLO, model="m")
    async for chunk in answer:
        assert chunk.text == "a"
        answer.close()
    await router.cancelled.wait()
    with pytest.raises(RuntimeError, match="closed before its end"):
        await answer.collect()


async def test_deadline_ends_a_hanging_turn(client: Any, router: FakeRouter) -> None:
    router.hang = True
    with pytest.raises(DeadlineError):
        await client.chat(HELLO, model="m", timeout_seconds=0.2).collect()


async def test_cancelling_the_task_cancels_the_call(router: FakeRouter) -> None:
    router.chunks, router.hang = [chat_chunk("a")], True
    started = asyncio.Event()

    async def consume(client: AsyncClient) -> None:
        async for _ in client.chat(HELLO, model="m"):
            started.set()

    async with serve_router(router) as address, AsyncClient(address) as client:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(consume(client))
            await started.wait()
            task.cancel()
        await router.cancelled.wait()


async def test_dropping_a_synchronous_answer_cancels_the_call(router: FakeRouter) -> None:
    router.chunks, router.hang = [chat_chunk("a")], True

    def first_chunk(client: Client) -> str:
        for chunk in client.chat(HELLO, model="m"):
            return chunk.text
        return ""

    async with serve_router(router) as address:
        with Client(address) as client:
            assert await asyncio.to_thread(first_chunk, client) == "a"
            gc.collect()
            await router.cancelled.wait()


async def test_models_routes_and_ending(client: Any, router: FakeRouter) -> None:
    router.models = [
        router_pb2.Model(name="m", max_model_len=64, prefill_workers=2, decode_workers=1)
    ]
    assert await client.models() == [ModelInfo("m", 64, 2, 1)]
    assert await client.end_conversation("c", model="m") == EndedConversation(True, True)
    route = await client.explain_route(model="m", conversation_id="c")
    assert (route.handle_available, route.miss_reason) == (False, "FIRST_TURN")
    assert route.candidates[0].role == "PREFILL"
    assert router.requests[0].conversation_id == "c"


async def test_unreachable_router_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            await client.models()


async def test_wrong_argument_is_refused_before_anything_is_sent(
    client: Any, router: FakeRouter
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        client.chat(HELLO, model="m", max_tokens=-1)
    assert caught.value.field == "sampling.max_tokens"
    assert router.requests == []
