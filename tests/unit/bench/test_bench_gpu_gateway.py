"""Last turns over the router's HTTP front."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.gpu.gateway import GatewayTurns
from kvloop.bench.turns import TurnRequest, TurnResult
from kvloop.errors import UnavailableError
from tests.unit.bench.fakes import result


class _OtherTurns:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.taken: list[TurnRequest] = []
        self.ended: list[str] = []

    async def run(self, request: TurnRequest) -> TurnResult:
        self.taken.append(request)
        return result(ttft=0.1)

    async def end(self, conversation: str) -> None:
        self.ended.append(conversation)


@asynccontextmanager
async def _front(
    status: int = 200,
) -> AsyncIterator[tuple[GatewayTurns, _OtherTurns, list[dict[str, Any]]]]:
    """A front that answers with two tokens in two chunks, and usage."""
    asked: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        reply = web.StreamResponse(status=status)
        await reply.prepare(request)
        for text in ("a", "b"):
            await reply.write(b"data: %s\n\n" % json.dumps({"choices": [{"text": text}]}).encode())
        await reply.write(b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n')
        await reply.write(b"data: [DONE]\n\n")
        return reply

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        others = _OtherTurns()
        url = str(server.make_url("")).rstrip("/")
        yield GatewayTurns(others, session, url, "m", time.perf_counter), others, asked


async def test_a_last_turn_goes_over_http_in_its_conversation() -> None:
    async with _front() as (turns, others, asked):
        taken = await turns.run(TurnRequest("c", [7, 8, 9], 2, reuse=True, last=True))
        assert others.taken == []
        assert asked == [
            {
                "model": "m",
                "prompt": [7, 8, 9],
                "temperature": 0,
                "ignore_eos": True,
                "max_tokens": 2,
                "stream": True,
                "stream_options": {"include_usage": True},
                "cache_salt": "c",
                "conversation_id": "c",
                "disable_reuse": False,
            }
        ]
        assert (taken.generated_tokens, taken.prompt_tokens) == (2, 3)
        assert 0 < taken.ttft_seconds <= taken.total_seconds
        assert len(taken.gaps_seconds) == 1


async def test_earlier_turns_and_the_end_are_the_other_turns() -> None:
    async with _front() as (turns, others, asked):
        earlier = TurnRequest("c", [7], 2, reuse=True, last=False)
        await turns.run(earlier)
        await turns.end("c")
        assert (others.taken, others.ended, asked) == ([earlier], ["c"], [])


async def test_a_refused_turn_is_an_error() -> None:
    async with _front(status=503) as (turns, _, _):
        with pytest.raises(UnavailableError, match="503"):
            await turns.run(TurnRequest("c", [7], 2, reuse=True, last=True))
