"""The gateway on real engines: fidelity, and reuse for an unmodified OpenAI client."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import aiohttp
import openai
import pytest

from services.router import app as router_app
from services.router.settings import RouterSettings
from tests.engine import fidelity
from tests.engine.engines import eventually
from tests.engine.world import MODEL, World

_FAR = {
    "strict": True,  # else vLLM lets the random model write any JSON
    "parameters": {
        "type": "object",
        "properties": {"far": {"type": "boolean"}},
        "required": ["far"],
        "additionalProperties": False,
    },
}


def _client(world: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{world.stack.gateway_url}/v1", api_key="none", max_retries=0
    )


async def test_replies_are_the_engines(world: World) -> None:
    async with aiohttp.ClientSession() as session:
        rows = await fidelity.compare(session, world.decode.url, world.stack.gateway_url, MODEL)
        async with session.get(f"{world.decode.url}/version") as reply:
            version = (await reply.json())["version"]
    page = fidelity.document(rows, version)
    if os.environ.get("KVLOOP_WRITE_DOCS"):
        fidelity.DOCUMENT.write_text(page)
    unused = [
        f"{row.feature.name} stream={row.stream}\n{row.direct}" for row in rows if not row.used
    ]
    assert not unused, "\n\n".join(unused)
    different = [row for row in rows if not row.same and not row.reason]
    assert not different, "\n\n".join(
        f"{row.feature.name} stream={row.stream}\n{row.direct}\n{row.through}" for row in different
    )
    assert all(row.through.status < 500 for row in rows)


async def test_an_openai_client_without_ids_pulls_turn_after_turn(world: World) -> None:
    history: list[Any] = [{"role": "user", "content": world.words(300)}]
    async with _client(world) as client:
        for turn in range(3):
            before = await world.prefill.pulled_tokens()
            await world.prefill.forget_prefixes()
            whole = await client.chat.completions.create(
                model=MODEL, messages=history, max_tokens=80, temperature=0
            )
            pulled = await world.prefill.pulled_tokens() - before
            assert (pulled > 300) is (turn > 0), (turn, pulled)
            assert whole.usage is not None
            assert whole.usage.prompt_tokens_details is not None
            assert whole.usage.prompt_tokens_details.cached_tokens == pulled
            history += [whole.choices[0].message, {"role": "user", "content": "go on"}]


async def test_streams_without_ids_pull_what_whole_replies_left_and_back(world: World) -> None:
    history: list[Any] = [{"role": "user", "content": world.words(300)}]
    async with _client(world) as client:
        for stream in (True, False, True):
            before = await world.prefill.pulled_tokens()
            await world.prefill.forget_prefixes()
            if stream:
                events = await client.chat.completions.create(
                    model=MODEL, messages=history, max_tokens=80, temperature=0, stream=True
                )
                text = "".join([c.choices[0].delta.content or "" async for c in events])
            else:
                whole = await client.chat.completions.create(
                    model=MODEL, messages=history, max_tokens=80, temperature=0
                )
                text = whole.choices[0].message.content or ""
            if len(history) > 1:
                assert await world.prefill.pulled_tokens() - before > 300
            history += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "go on"},
            ]


async def test_two_openai_clients_with_one_preamble_do_not_meet(world: World) -> None:
    system = {"role": "system", "content": world.words(200)}
    histories: list[list[Any]] = [
        [system, {"role": "user", "content": world.words(100)}] for _ in range(2)
    ]
    async with _client(world) as client:
        for history in histories:
            whole = await client.chat.completions.create(
                model=MODEL, messages=history, max_tokens=80, temperature=0
            )
            history += [whole.choices[0].message, {"role": "user", "content": "go on"}]
        for history in histories:
            before = await world.prefill.pulled_tokens()
            await world.prefill.forget_prefixes()
            sent = [m if isinstance(m, dict) else m.model_dump() for m in history]
            right = await world.decode.recompute_chat(
                [{"role": m["role"], "content": m["content"]} for m in sent], 40
            )
            reply = await client.chat.completions.create(
                model=MODEL,
                messages=history,
                max_tokens=40,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            assert await world.prefill.pulled_tokens() - before > 300
            assert tuple(reply.choices[0].model_dump()["token_ids"]) == right


async def test_a_tool_is_called_and_answered_over_several_turns(world: World) -> None:
    """The calls go back in the history, with ids and arguments as the SDK dumps them."""
    look: Any = {"type": "function", "function": {"name": "look", **_FAR}}
    history: list[Any] = [{"role": "user", "content": world.words(300)}]
    async with _client(world) as client:
        for turn in range(3):
            before = await world.prefill.pulled_tokens()
            await world.prefill.forget_prefixes()
            reply = await client.chat.completions.create(
                model=MODEL,
                messages=history,
                tools=[look],
                tool_choice={"type": "function", "function": {"name": "look"}},
                max_tokens=80,
                temperature=0,
            )
            message = reply.choices[0].message
            assert message.tool_calls
            (call,) = message.tool_calls
            assert call.type == "function"
            assert isinstance(json.loads(call.function.arguments)["far"], bool)
            assert (await world.prefill.pulled_tokens() - before > 300) is (turn > 0)
            history += [message, {"role": "tool", "tool_call_id": call.id, "content": "waves"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_strips_reasoning_still_pulls(world: World, stream: bool) -> None:
    # Whether the small model reasons depends on what it is told.
    assert any([await _pulls_without_its_reasoning(world, stream) for _ in range(4)])


async def _pulls_without_its_reasoning(world: World, stream: bool) -> bool:
    """Two turns of a client that sends answers back without their reasoning; whether
    there was any."""
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {"4": 8}}
    history: list[Any] = [{"role": "user", "content": world.words(300)}]
    reasoned = False
    async with _client(world) as client:
        for turn in range(2):
            before = await world.prefill.pulled_tokens()
            await world.prefill.forget_prefixes()
            asked: Any = {"model": MODEL, "messages": history, "max_tokens": 80, "temperature": 0}
            if stream:
                deltas = [
                    event.choices[0].delta.model_dump()
                    async for event in await client.chat.completions.create(
                        **asked, extra_body=thinking, stream=True
                    )
                ]
            else:
                whole = await client.chat.completions.create(**asked, extra_body=thinking)
                deltas = [whole.choices[0].message.model_dump()]
            reasoned = reasoned or any(delta.get("reasoning") for delta in deltas)
            text = "".join(delta.get("content") or "" for delta in deltas)
            assert (await world.prefill.pulled_tokens() - before > 300) is (turn > 0)
            history += [
                {"role": "assistant", "content": text.strip()},
                {"role": "user", "content": "go on"},
            ]
    return reasoned


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_responses_pulls_turn_after_turn(world: World, stream: bool) -> None:
    """Stateless, as the SDK's own guide has it: what came out goes in again."""
    history: list[Any] = [{"role": "user", "content": world.words(300)}]
    async with _client(world) as client:
        for turn in range(3):
            before = await world.prefill.pulled_tokens()
            await world.prefill.forget_prefixes()
            asked: Any = {
                "model": MODEL,
                "instructions": "You are brief.",
                "input": history,
                "max_output_tokens": 80,
                "temperature": 0,
                "store": False,
            }
            if stream:
                *_, last = [e async for e in await client.responses.create(**asked, stream=True)]
                assert last.type == "response.completed"
                answer = last.response
            else:
                answer = await client.responses.create(**asked)
            pulled = await world.prefill.pulled_tokens() - before
            assert (pulled > 300) is (turn > 0), (turn, pulled)
            assert answer.usage is not None
            assert answer.usage.input_tokens_details.cached_tokens == pulled
            assert answer.output_text
            history += [*answer.output, {"role": "user", "content": "go on"}]


async def test_a_function_called_in_a_response_is_answered_in_the_next(world: World) -> None:
    look: Any = {"type": "function", "name": "look", **_FAR}
    history: list[Any] = [{"role": "user", "content": world.words(300)}]
    async with _client(world) as client:
        for turn in range(2):
            before = await world.prefill.pulled_tokens()
            await world.prefill.forget_prefixes()
            answer = await client.responses.create(
                model=MODEL,
                input=history,
                tools=[look],
                tool_choice={"type": "function", "name": "look"},
                max_output_tokens=80,
                temperature=0,
            )
            (call,) = answer.output
            assert call.type == "function_call"
            assert (await world.prefill.pulled_tokens() - before > 300) is (turn > 0)
            done = {"type": "function_call_output", "call_id": call.call_id, "output": "waves"}
            history += [call, done]


@pytest.mark.parametrize("tokenized", [False, True])
async def test_a_prompt_that_grows_pulls_without_an_id(world: World, tokenized: bool) -> None:
    """A text client: every prompt is the last one, its answer, and more."""
    prompt: Any = world.tokens(300) if tokenized else world.words(400)
    async with _client(world) as client:
        for turn in range(3):
            before = await world.prefill.pulled_tokens()
            await world.prefill.forget_prefixes()
            reply = await client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=60,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            assert (await world.prefill.pulled_tokens() - before > 250) is (turn > 0)
            choice = reply.choices[0].model_dump()
            if tokenized:
                prompt = [*prompt, *choice["token_ids"], *world.tokens(5)]
            else:
                prompt += choice["text"] + world.words(5)


async def test_A11_a_tenants_prefixes_are_found_by_that_tenant_alone(world: World) -> None:
    """On real engines, by their own counters: neither in P's cache nor to pull."""
    keys = ",".join(
        f"{tenant} {hashlib.sha256(tenant.encode()).hexdigest()}" for tenant in ("a", "b")
    )
    settings = RouterSettings(
        listen="127.0.0.1:0",
        gateway_listen="127.0.0.1:0",
        kvmeta=world.stack.kvmeta_address,
        api_keys=keys,
    )
    text = world.words(300)
    async with router_app.build(settings) as router:
        await eventually(_serves(router), "the second router knows both workers")
        found = []
        for tenant in ("a", "b", "b", "a"):
            async with openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{router.gateway_port}/v1", api_key=tenant
            ) as client:
                computed = await world.prefill.computed_tokens()
                reply = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": text}],
                    max_tokens=2,
                    extra_body={"cache_salt": "the same for both"},
                )
                assert reply.usage is not None
                more = await world.prefill.computed_tokens() - computed
                found.append(more < reply.usage.prompt_tokens / 2)
    assert found == [False, False, True, True]


def _serves(router: router_app.Router) -> Any:
    async def served() -> bool:
        return any(model.prefill and model.decode for model in router.pool.models())

    return served
