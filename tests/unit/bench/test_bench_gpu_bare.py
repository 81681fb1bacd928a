"""The bare protocol, on two simulated engines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.gpu.bare import BareTurns, DecodeAlone
from bench.gpu.split import SplitTurns
from kvloop.bench.turns import TurnRequest
from kvloop.errors import UnavailableError
from tests.flow.sim.engines import MODEL, EngineClient, engine, prompt


@asynccontextmanager
async def _bare(
    *, last_ids: bool = True
) -> AsyncIterator[tuple[BareTurns, EngineClient, EngineClient]]:
    async with (
        engine(role="prefill") as prefill,
        engine(role="decode") as decode,
        aiohttp.ClientSession() as session,
    ):
        yield (
            BareTurns(
                session, prefill.url, decode.url, MODEL, time.perf_counter, last_ids=last_ids
            ),
            prefill,
            decode,
        )


async def _no_pins(decode: EngineClient) -> None:
    await decode.until(lambda state: not state["pins"])


async def test_the_second_turn_carries_decodes_handle_and_equals_a_recompute() -> None:
    async with _bare() as (turns, _, decode):
        first = prompt(300)
        opening = await turns.run(TurnRequest("a", first, 32, reuse=True, last=False))
        assert len(opening.token_ids) == 32
        history = [*first, *opening.token_ids, *prompt(20, seed=1)]
        again = await turns.run(TurnRequest("a", history, 16, reuse=True, last=True))
        assert again.pulled_tokens == 331
        assert len(again.gaps_seconds) > 0
        assert again.ttft_seconds >= again.prefill_leg_seconds > 0
        fresh = await turns.run(TurnRequest("b", history, 16, reuse=False, last=True))
        assert fresh.pulled_tokens == 0
        assert fresh.token_ids == again.token_ids
        async with asyncio.timeout(25):
            await _no_pins(decode)


async def test_a_last_turn_without_ids_is_timed_all_the_same() -> None:
    async with _bare(last_ids=False) as (turns, _, decode):
        first = prompt(300)
        opening = await turns.run(TurnRequest("a", first, 32, reuse=True, last=False))
        assert len(opening.token_ids) == 32
        history = [*first, *opening.token_ids, *prompt(20, seed=1)]
        again = await turns.run(TurnRequest("a", history, 16, reuse=True, last=True))
        assert (again.token_ids, again.generated_tokens) == ((), 16)
        assert again.pulled_tokens == 331
        assert again.total_seconds > again.ttft_seconds >= again.prefill_leg_seconds > 0
        async with asyncio.timeout(25):
            await _no_pins(decode)


async def test_a_turn_without_reuse_leaves_nothing_retained() -> None:
    async with _bare() as (turns, _, decode):
        await turns.run(TurnRequest("a", prompt(300), 32, reuse=False, last=False))
        async with asyncio.timeout(25):
            await _no_pins(decode)


async def test_a_conversation_that_ends_early_gives_its_handle_up() -> None:
    async with _bare() as (turns, _, decode):
        await turns.run(TurnRequest("a", prompt(300), 32, reuse=True, last=False))
        assert (await decode.state())["pins"]
        await turns.end("a")
        async with asyncio.timeout(25):
            await _no_pins(decode)
        await turns.end("a")


async def test_on_kvloops_own_engines_the_bare_protocol_pulls_too() -> None:
    async with _bare() as (turns, prefill, _):
        first = prompt(300)
        opening = await turns.run(TurnRequest("a", first, 128, reuse=True, last=False))
        history = [*first, *opening.token_ids, *prompt(20, seed=1)]
        await turns.run(TurnRequest("a", history, 16, reuse=True, last=True))
        cached, held = 300 // 16 * 16, 300 + 128 - 1
        pulled = await prefill.metric("vllm:external_prefix_cache_hits_total")
        assert pulled == held - cached


async def test_a_split_turn_finds_all_but_its_tail_computed() -> None:
    async with (
        engine(role="prefill") as prefill,
        engine(role="decode") as decode,
        aiohttp.ClientSession() as session,
    ):
        bare = BareTurns(session, prefill.url, decode.url, MODEL, time.perf_counter)
        turns = SplitTurns(bare, session, prefill.url, MODEL, tail_tokens=40)
        asked = prompt(300)
        split = await turns.run(TurnRequest("a", asked, 16, reuse=False, last=True))
        whole = await bare.run(TurnRequest("b", asked, 16, reuse=False, last=True))
        assert split.token_ids == whole.token_ids
        assert await prefill.metric("vllm:prefix_cache_hits_total") == 260 // 16 * 16


async def test_decode_alone_answers_without_prefill() -> None:
    async with (
        engine(role="prefill") as prefill,
        engine(role="decode") as decode,
        aiohttp.ClientSession() as session,
    ):
        turns = DecodeAlone(session, prefill.url, decode.url, MODEL, time.perf_counter)
        answer = await turns.run(TurnRequest("a", prompt(300), 16, reuse=False, last=True))
        assert len(answer.token_ids) == 16
        assert answer.prefill_leg_seconds == 0
        await _no_pins(decode)


async def test_tokens_are_those_the_engine_counts_however_many_come_in_a_chunk() -> None:
    async with _canned([(1, None), (4, None), (8, None), (12, None)]) as turns:
        taken = await turns.run(TurnRequest("a", [11, 12], 6, reuse=False, last=True))
    assert (taken.token_ids, taken.generated_tokens) == ((), 6)
    assert len(taken.gaps_seconds) == 2


async def test_an_answer_that_ends_before_it_has_its_tokens_has_failed() -> None:
    async with _canned([(1, None), (4, "length")]) as turns:
        with pytest.raises(UnavailableError, match="4 of 6 tokens"):
            await turns.run(TurnRequest("a", [11, 12], 6, reuse=False, last=True))


@asynccontextmanager
async def _canned(chunks: Sequence[tuple[int, str | None]]) -> AsyncIterator[BareTurns]:
    """Turns on a server whose streams are given: tokens so far, and why the answer ended."""

    async def complete(request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.json_response({"choices": [{}], "kv_transfer_params": {}})
        reply = web.StreamResponse()
        await reply.prepare(request)
        for tokens, reason in chunks:
            choice = {"text": "", "finish_reason": reason}
            piece = {"choices": [choice], "usage": {"completion_tokens": tokens}}
            await reply.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        return reply

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        yield BareTurns(session, url, url, MODEL, time.perf_counter, last_ids=False)
