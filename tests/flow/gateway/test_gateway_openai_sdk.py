"""The real `openai` SDK, unmodified, against the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.flow.gateway.fleet import PREAMBLE, Fleet, fleet
from tests.flow.router.fakes import eventually
from tests.flow.sim.engines import MODEL


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as running:
        yield running


@pytest.fixture
async def client(stack: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


async def _pulled(stack: Fleet) -> float:
    return stack.count("prompt_tokens_total", source="pulled")


async def test_a_chat_without_any_id_pulls_its_second_turn(
    stack: Fleet, client: openai.AsyncOpenAI
) -> None:
    history: list[Any] = [{"role": "user", "content": PREAMBLE}]
    first = await client.chat.completions.create(model=MODEL, messages=history, max_tokens=100)
    history += [first.choices[0].message, {"role": "user", "content": "and the sea?"}]
    second = await client.chat.completions.create(model=MODEL, messages=history, max_tokens=100)
    assert await _pulled(stack) >= 96
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= second.usage.prompt_tokens - 40


async def test_a_streamed_chat_without_any_id_pulls_its_second_turn(
    stack: Fleet, client: openai.AsyncOpenAI
) -> None:
    history: list[Any] = [{"role": "user", "content": PREAMBLE}]
    for expected in (0, 96):
        text = ""
        cached = None
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=history,
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            elif chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens
        assert await _pulled(stack) >= expected
        assert cached is not None
        assert cached >= expected
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]


async def test_a_chat_that_streams_one_turn_and_not_the_next_pulls_too(
    stack: Fleet, client: openai.AsyncOpenAI
) -> None:
    history: list[Any] = [{"role": "user", "content": PREAMBLE}]
    stream = await client.chat.completions.create(
        model=MODEL, messages=history, max_tokens=100, stream=True
    )
    text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    history += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    await client.chat.completions.create(model=MODEL, messages=history, max_tokens=10)
    assert await _pulled(stack) >= 96


async def test_models_and_errors_are_what_the_sdk_expects(client: openai.AsyncOpenAI) -> None:
    models = [model.id async for model in client.models.list()]
    assert models == [MODEL]
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(
            model="other", messages=[{"role": "user", "content": "hi"}]
        )
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=-1
        )


async def test_completions_work_streamed_and_whole(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="hello", max_tokens=20)
    stream = await client.completions.create(
        model=MODEL, prompt="hello", max_tokens=20, stream=True
    )
    streamed = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    assert streamed == whole.choices[0].text != ""


async def test_several_choices_are_all_there(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=5
    )
    assert [choice.index for choice in whole.choices] == [0, 1, 2]


async def test_closing_a_stream_stops_both_engines(tmp_path: Path) -> None:
    async with fleet(tmp_path, sim={"preset": "tiny-cpu"}) as stack:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=5000,
                stream=True,
            )
            await anext(aiter(stream))
            await stream.close()
            await stack.settled()
            await eventually(lambda: stack.count("turns_total", outcome="cancelled"))
        # Broken off like at a stop string; the sidecar, which knows better, frees it.
        await stack.decode.until(lambda state: state["pins"] == [])
