"""Bad input gets a typed error that names the field, and reaches no worker."""

from __future__ import annotations

import pytest

from kvloop import rpc
from kvloop.errors import InvalidFieldError, ModelNotFoundError, UnavailableError
from kvloop.router.v1 import router_pb2
from services.router.breaker import BreakerState
from tests.flow.router.fakes import MAX_MODEL_LEN, raises
from tests.flow.router.stack import Stack, running

Message = router_pb2.ChatMessage
Sampling = router_pb2.SamplingParams


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [Message(role="robot", content="x")]}, "messages[0].role"),
        ({"sampling": Sampling(max_tokens=0)}, "sampling.max_tokens"),
        ({"sampling": Sampling(temperature=-1)}, "sampling.temperature"),
        ({"extra_body_json": b'{"max_tokens":-5}'}, "extra_body_json.max_tokens"),
        ({"extra_body_json": b'{"temperature":"hot"}'}, "extra_body_json.temperature"),
        ({"extra_body_json": b'{"kv_transfer_params":{}}'}, "extra_body_json.kv_transfer_params"),
        ({"extra_body_json": b"[]"}, "extra_body_json"),
        ({"extra_body_json": b"{"}, "extra_body_json"),
        ({"conversation_id": "x" * 257}, "conversation_id"),
        ({"sampling": Sampling(max_tokens=MAX_MODEL_LEN + 1)}, "sampling.max_tokens"),
    ],
)
async def test_a_bad_field_is_named_and_no_worker_is_called(fields, field) -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        with pytest.raises(InvalidFieldError) as caught:
            await stack.chat(**({"conversation_id": "c"} | fields))
        assert caught.value.field == field
        assert stack.worker_calls == 0
        assert stack.ledger.taken == []
        assert stack.count("turns_total", outcome="rejected") == 1


async def test_unknown_model_names_the_known_ones() -> None:
    async with running() as stack:
        with pytest.raises(ModelNotFoundError, match="'tiny'"):
            await stack.chat("c", model="huge")
        assert stack.worker_calls == 0


async def test_a_model_without_decode_workers_is_unavailable() -> None:
    async with running(decode=[]) as stack:
        with pytest.raises(UnavailableError) as caught:
            await stack.chat("c")
        assert caught.value.reason == "NO_DECODE_WORKER"
        assert stack.worker_calls == 0


async def generate(stack: Stack, **fields) -> router_pb2.GenerateResponse:
    events = stack.stub.Generate(router_pb2.GenerateRequest(model="tiny", **fields))
    with rpc.typed_errors():
        return [event async for event in events][-1]


async def test_token_prompt_must_leave_room_for_one_token() -> None:
    async with running() as stack:
        fits = router_pb2.TokenIds(ids=[1] * (MAX_MODEL_LEN - 1))
        await generate(stack, token_ids=fits)
        calls = stack.worker_calls
        with pytest.raises(InvalidFieldError) as caught:
            await generate(stack, token_ids=router_pb2.TokenIds(ids=[1] * MAX_MODEL_LEN))
        assert caught.value.field == "token_ids"
        assert stack.worker_calls == calls


async def test_short_text_is_not_counted() -> None:
    async with running() as stack:
        await generate(stack, text="x" * (MAX_MODEL_LEN - 100))
        assert stack["d0"].counts == []


async def test_long_text_is_counted_before_prefill_and_refused_if_too_long() -> None:
    async with running() as stack:
        stack["d0"].num_tokens = MAX_MODEL_LEN
        with pytest.raises(InvalidFieldError, match="1000 tokens") as caught:
            await generate(stack, text="x" * 3 * MAX_MODEL_LEN)
        assert caught.value.field == "text"
        assert len(stack["d0"].counts) == stack.worker_calls == 1


async def test_long_text_of_few_tokens_passes() -> None:
    async with running() as stack:
        stack["d0"].num_tokens = 10
        answer = await generate(stack, text="x" * 3 * MAX_MODEL_LEN)
        assert answer.HasField("result")


async def test_request_that_cannot_be_tokenized_is_refused_before_prefill() -> None:
    async with running() as stack:
        stack["d0"].num_tokens = InvalidFieldError("template", reason="ENGINE_REJECTED")
        with pytest.raises(InvalidFieldError) as caught:
            await generate(stack, text="x" * 3 * MAX_MODEL_LEN)
        assert caught.value.reason == "ENGINE_REJECTED"
        assert stack["p0"].calls == 0


async def test_failed_count_leaves_the_check_to_the_engine() -> None:
    async with running() as stack:
        stack["d0"].num_tokens = UnavailableError("no engine", reason="ENGINE_UNREACHABLE")
        answer = await generate(stack, text="x" * 3 * MAX_MODEL_LEN)
        assert answer.HasField("result")
        assert stack.count("fallbacks_total", cause="length_check_skipped") == 1


async def test_a_count_says_nothing_of_the_workers_health() -> None:
    async with running(settings={"worker_cooldown_seconds": 0}) as stack:
        unreachable = UnavailableError("no engine", reason="ENGINE_UNREACHABLE")
        with pytest.raises(UnavailableError), stack.router.pool.use("d0"):
            raise unreachable
        stack["d0"].num_tokens = MAX_MODEL_LEN
        with pytest.raises(InvalidFieldError):
            await generate(stack, text="x" * 3 * MAX_MODEL_LEN)
        assert len(stack["d0"].counts) == 1
        assert stack.router.pool.breakers(BreakerState.HALF_OPEN) == 1


async def test_the_engines_own_refusal_reaches_the_client() -> None:
    async with running() as stack:
        refusal = InvalidFieldError(
            "too long", reason="ENGINE_REJECTED", http_status=400, engine_message="1001 > 1000"
        )
        stack["p0"].prefill_steps = [raises(refusal)]
        with pytest.raises(InvalidFieldError) as caught:
            await generate(stack, text="x")
        assert caught.value.metadata == {"http_status": "400", "engine_message": "1001 > 1000"}
        assert stack["d0"].calls == 0


@pytest.mark.parametrize(
    ("model", "conversation_id"), [("", "c"), ("tiny", ""), ("tiny", "x" * 257)]
)
async def test_ending_a_conversation_needs_model_and_id(model, conversation_id) -> None:
    async with running() as stack:
        request = router_pb2.EndConversationRequest(model=model, conversation_id=conversation_id)
        with pytest.raises(InvalidFieldError), rpc.typed_errors():
            await stack.stub.EndConversation(request)
