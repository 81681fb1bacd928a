"""Completions without an id: known by the beginning of their prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.flow.gateway.fleet import COMPLETIONS, PREAMBLE, Fleet, HttpReply, fleet
from tests.flow.sim.engines import MODEL

LONG = PREAMBLE * 3
"""Of 2048 characters and more, and far from 4096."""


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as running:
        yield running


async def _complete(stack: Fleet, prompt: Any, **members: Any) -> HttpReply:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 100, **members}
    return await stack.post(COMPLETIONS, body)


def _miss(reply: HttpReply) -> str:
    return reply.headers.get("x-kvloop-miss-reason", "")


async def test_a_prompt_that_its_answer_and_more_extend_pulls(stack: Fleet) -> None:
    prompt = LONG
    for turn in (1, 2, 3):
        reply = await _complete(stack, prompt)
        assert reply.headers["x-kvloop-turn"] == str(turn)
        assert _miss(reply) == ("FIRST_TURN" if turn == 1 else "")
        assert (int(reply.headers["x-kvloop-pulled-tokens"]) >= 64) is (turn > 1)
        prompt += reply.json["choices"][0]["text"] + " and then?"


async def test_a_tokenized_prompt_that_grows_pulls(stack: Fleet) -> None:
    prompt = [7 + i % 90 for i in range(300)]
    for turn in (1, 2):
        reply = await _complete(stack, prompt, return_token_ids=True)
        assert (int(reply.headers["x-kvloop-pulled-tokens"]) >= 64) is (turn > 1)
        prompt = [*prompt, *reply.json["choices"][0]["token_ids"], 9]


async def test_A10_prompts_with_one_beginning_are_right_and_only_one_pulls(stack: Fleet) -> None:
    first = await _complete(stack, LONG)
    prompts = [LONG + first.json["choices"][0]["text"] + f" and {name}?" for name in ("a", "b")]
    replies = [await _complete(stack, prompt, max_tokens=5) for prompt in prompts]
    assert [reply.status for reply in replies] == [200, 200]
    pulled = [int(reply.headers["x-kvloop-pulled-tokens"]) for reply in replies]
    assert pulled[0] >= 64
    alone = [await _complete(stack, p, max_tokens=5, disable_reuse=True) for p in prompts]
    assert [r.json["choices"] for r in replies] == [r.json["choices"] for r in alone]


async def test_short_prompts_and_several_prompts_retain_nothing(stack: Fleet) -> None:
    assert _miss(await _complete(stack, "hello")) == "NO_CONVERSATION"
    assert _miss(await _complete(stack, [LONG, LONG])) == "UNSUPPORTED"
    await stack.decode.until(lambda state: state["pins"] == [])


async def test_one_prompt_in_a_list_is_one_prompt(stack: Fleet) -> None:
    reply = await _complete(stack, [LONG])
    prompt = LONG + reply.json["choices"][0]["text"] + " more"
    assert int((await _complete(stack, prompt)).headers["x-kvloop-pulled-tokens"]) >= 64


async def test_an_id_of_the_clients_own_comes_first(stack: Fleet) -> None:
    await _complete(stack, LONG, conversation_id="mine")
    assert _miss(await _complete(stack, LONG)) == "FIRST_TURN"


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    async with fleet(tmp_path, derive_conversations=False) as stack:
        assert _miss(await _complete(stack, LONG)) == "NO_CONVERSATION"
        await stack.decode.until(lambda state: state["pins"] == [])
