"""The gateway on real engines: fidelity, and reuse for an unmodified OpenAI client."""

from __future__ import annotations

import os
from typing import Any

import aiohttp
import openai

from tests.engine import fidelity
from tests.engine.conftest import MODEL, World


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
