"""What each leg is sent, and limits, over fake workers, by FAULTS row."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from kvloop.errors import InvalidFieldError, UnavailableError
from services.router.breaker import BreakerState
from services.worker.engine import Api
from services.worker.prefill_body import read_prefill_body, rest_of_prefill_body
from tests.flow.gateway.fleet import CHAT, COMPLETIONS, HttpReply
from tests.flow.router.fakes import eventually, raises, waits
from tests.flow.router.memory_ledger import MODEL
from tests.flow.router.stack import DECODE, Stack, running, slow_clock

HI = [{"role": "user", "content": "hi"}]
CHUNKS = [b'{"choices":[{"index":0,"delta":{"content":"a"}}]}', b'{"choices":[]}']


class Client:
    """Speaks HTTP to the gateway of a router over fakes."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession, host: str) -> None:
        self.stack = stack
        self._session = session
        self.url = f"http://{host}:{stack.router.gateway_port}"

    async def post(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> HttpReply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.post(
            self.url + path, data=io.BytesIO(data), headers=headers
        ) as reply:
            return HttpReply(reply.status, reply.headers, await reply.read())

    async def get(self, path: str) -> HttpReply:
        async with self._session.get(self.url + path) as reply:
            return HttpReply(reply.status, reply.headers, await reply.read())

    async def chat(self, headers: Mapping[str, str] | None = None, **members: Any) -> HttpReply:
        return await self.post(CHAT, {"model": MODEL, "messages": HI, **members}, headers)


@asynccontextmanager
async def gateway(
    host: str = "127.0.0.1", clock: Callable[[], float] = slow_clock, **settings: Any
) -> AsyncIterator[Client]:
    """A gateway over a fake prefill and a fake decode worker."""
    chosen = {"gateway_listen": f"{host}:0", **settings}
    async with running(settings=chosen, clock=clock) as stack, aiohttp.ClientSession() as session:
        stack["d0"].chunks = CHUNKS
        yield Client(stack, session, host)


def _prefilled(client: Client) -> dict[str, Any]:
    """The body with which the sidecar would ask the prefill engine, for what it was sent."""
    (request,) = client.stack["p0"].prefills
    head = read_prefill_body(Api.CHAT_COMPLETIONS, request.body_json)
    body: dict[str, Any] = json.loads(head + rest_of_prefill_body(turn_id="t", handle=b""))
    return body


def _decoded(client: Client) -> dict[str, Any]:
    (request,) = client.stack["d0"].decodes
    body: dict[str, Any] = json.loads(request.body_json)
    return body


async def test_C1_prefill_makes_one_token_whatever_limits_the_answer() -> None:
    async with gateway() as client:
        await client.chat(max_completion_tokens=500, max_tokens=400)
        assert _prefilled(client)["max_tokens"] == 1
        assert "max_completion_tokens" not in _prefilled(client)
        assert _decoded(client)["max_completion_tokens"] == 500
        assert _decoded(client)["max_tokens"] == 400


async def test_C2_stream_options_are_for_decode_alone() -> None:
    async with gateway() as client:
        await client.chat(stream=True, stream_options={"include_usage": True})
        assert "stream_options" not in _prefilled(client)
        assert _prefilled(client)["stream"] is False
        assert _decoded(client)["stream_options"] == {"include_usage": True}


async def test_C4_nothing_can_end_or_delay_prefills_token() -> None:
    members: dict[str, Any] = {
        "stop": ["\n"],
        "min_tokens": 5,
        "stop_token_ids": [1],
        "max_tokens": 9,
    }
    async with gateway() as client:
        await client.chat(**members)
        sent = _prefilled(client)
        assert sent["ignore_eos"] is True
        assert not sent.keys() & {"stop", "min_tokens", "stop_token_ids"}
        assert _decoded(client).items() >= members.items()


async def test_C5_params_keep_every_byte_between_ledger_and_engines() -> None:
    params = b'{ "z":1, "a":[[3,2],[ ]],"deadline":12345.000,"n":null,"big":18446744073709551617}'
    async with gateway() as client:
        client.stack.give_handle("c", "d0", params)
        client.stack["p0"].handover = b'{"remote_block_ids":[[7 , 8]], "x":{"y":1e5}}'
        await client.chat(conversation_id="c")
        assert client.stack["p0"].prefills[0].transfer_params_json == params
        assert client.stack["d0"].decodes[0].transfer_params_json == client.stack["p0"].handover


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_C6_a_missing_hand_over_is_counted_for_every_api(path: str, stream: bool) -> None:
    prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    async with gateway() as client:
        client.stack["p0"].handover = b""
        reply = await client.post(path, {"model": MODEL, "stream": stream, **prompt})
        assert reply.status == 200
        assert client.stack.count("fallbacks_total", cause="no_handover") == 1


async def test_E2_remote_request_ids_are_relayed_and_never_made() -> None:
    params = b'{"remote_request_id":"chatcmpl-1-8f3a91bc"}'
    async with gateway() as client:
        client.stack.give_handle("c", "d0", params)
        reply = await client.chat({"x-request-id": "1"}, conversation_id="c")
        (sent,) = client.stack["p0"].prefills
        assert sent.transfer_params_json == params
        assert sent.turn_id == reply.headers["x-kvloop-turn-id"]
        assert b"request_id" not in sent.body_json


async def test_E3_the_gateway_serves_on_ipv6() -> None:
    async with gateway("[::1]") as client:
        assert (await client.chat()).status == 200


async def test_bodies_reach_workers_as_they_came_less_kvloops_own_members() -> None:
    body = (
        b'{ "model":"tiny","seed_bias":1.50, "messages":[{"role":"user","content":"\\u4f60"}],'
        b'"conversation_id":"c","disable_reuse":false,"request_id":"r","x":{"y":[1e5,null]}}'
    )
    async with gateway() as client:
        await client.post(CHAT, body)
        assert client.stack["d0"].decodes[0].body_json == (
            b'{"model":"tiny","seed_bias":1.50,"messages":[{"role":"user","content":"\\u4f60"}],'
            b'"x":{"y":[1e5,null]}}'
        )


@pytest.mark.parametrize("size", [5 * 2**20, 20 * 2**20])
async def test_D11_large_prompts_pass_all_hops(size: int) -> None:
    async with gateway() as client:
        messages = [{"role": "user", "content": "x" * size}]
        reply = await client.post(CHAT, {"model": MODEL, "messages": messages})
        assert reply.status == 200
        assert len(client.stack["d0"].decodes[0].body_json) > size


async def test_D11_large_handles_and_large_chunks_pass_all_hops() -> None:
    async with gateway() as client:
        large = json.dumps({"remote_block_ids": [list(range(200_000))]}).encode()
        client.stack.give_handle("c", "d0", large)
        client.stack["d0"].chunks = [b'{"choices":[],"x":"%s"}' % (b"x" * 8_000_000)]
        reply = await client.chat(conversation_id="c")
        assert reply.raw == client.stack["d0"].chunks[0]
        assert client.stack["p0"].prefills[0].transfer_params_json == large


@pytest.mark.parametrize("chunked", [False, True])
async def test_D11_a_body_above_the_limit_is_refused_with_a_clear_error(chunked: bool) -> None:
    async with gateway(max_body_bytes=10_000) as client:
        data = b'{"model":"tiny","messages":"' + b"x" * 20_000 + b'"}'

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(data), 1000):
                yield data[start : start + 1000]

        async with (
            aiohttp.ClientSession() as session,
            session.post(client.url + CHAT, data=pieces() if chunked else data) as reply,
        ):
            assert reply.status == 413
            assert "10000 bytes" in (await reply.json())["error"]["message"]
        assert client.stack.worker_calls == 0


async def test_a_head_above_the_limit_is_refused() -> None:
    async with gateway() as client:
        assert (await client.chat({"x-y": "z" * 6000})).status == 200
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", client.stack.router.gateway_port
        )
        writer.write(b"GET /health HTTP/1.1\r\nx: " + b"y" * 200_000)
        await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 431")
        writer.close()


async def test_turns_wait_for_room_and_are_refused_when_too_many_wait() -> None:
    async with gateway(max_running_turns=1, max_waiting_turns=1) as client:
        gate = asyncio.Event()
        client.stack["d0"].decode_steps = [waits(gate)]
        first = asyncio.ensure_future(client.chat())
        await eventually(lambda: client.stack["d0"].decodes)
        second = asyncio.ensure_future(client.chat(stream=True))
        await eventually(lambda: client.stack.router.admission.waiting == 1)
        refused = await client.chat()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert client.stack.count("turns_total", outcome="turned_away") == 1
        assert len(client.stack["d0"].decodes) == 1
        gate.set()
        assert [(await first).status, (await second).status] == [200, 200]
        assert client.stack.router.admission.waiting == 0


async def test_a_turn_that_waits_too_long_is_refused() -> None:
    async with gateway(max_running_turns=1, max_wait_seconds=0.05) as client:
        gate = asyncio.Event()
        client.stack["d0"].decode_steps = [waits(gate)]
        first = asyncio.ensure_future(client.chat())
        await eventually(lambda: client.stack["d0"].decodes)
        refused = await client.chat()
        assert refused.status == 503
        assert "retry-after" in refused.headers
        gate.set()
        assert (await first).status == 200
        assert (await client.chat()).status == 200


async def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue() -> None:
    async with gateway(max_running_turns=1) as client:
        gate = asyncio.Event()
        client.stack["d0"].decode_steps = [waits(gate)]
        first = asyncio.ensure_future(client.chat())
        await eventually(lambda: client.stack["d0"].decodes)
        second = asyncio.ensure_future(client.chat())
        await eventually(lambda: client.stack.router.admission.waiting == 1)
        second.cancel()
        await eventually(lambda: client.stack.router.admission.waiting == 0)
        gate.set()
        assert (await first).status == 200


async def test_rates_are_limited() -> None:
    async with gateway(rate_limit="2/hour") as client:
        assert [(await client.chat()).status for _ in range(3)] == [200, 200, 429]
        reply = await client.chat(stream=True)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1800")
        assert reply.error["type"] == "RateLimitError"


async def test_a_turn_beyond_its_time_is_a_timeout() -> None:
    async with gateway(max_turn_seconds=0.2, clock=time.monotonic) as client:
        client.stack["d0"].decode_steps = [waits(asyncio.Event())]
        reply = await client.chat()
        assert (reply.status, reply.error["type"]) == (504, "TimeoutError")


async def test_a_defect_shows_a_fixed_text_alone() -> None:
    async with gateway() as client:
        client.stack["d0"].decode_steps = [raises(RuntimeError("secret"))] * 2
        reply = await client.chat()
        assert reply.status == 500
        assert b"secret" not in reply.raw


async def test_refusals_of_workers_keep_their_field() -> None:
    async with gateway() as client:
        client.stack["p0"].prefill_steps = [raises(InvalidFieldError("bad", field="seed"))]
        reply = await client.chat()
        assert (reply.status, reply.error["param"]) == (400, "seed")


async def test_other_paths_and_methods_are_openai_errors() -> None:
    async with gateway() as client:
        assert (await client.post("/v1/embeddings", {})).error["code"] == 404
        assert (await client.get(CHAT)).error["code"] == 405


async def test_health_and_metrics_tell_how_the_router_is() -> None:
    async with gateway() as client:
        await client.chat()
        assert [
            (await client.get(path)).status for path in ("/health", "/health/live", "/health/ready")
        ] == [200, 200, 200]
        metrics = (await client.get("/metrics")).raw
        assert b'kvloop_router_turns_total{outcome="answered"} 1.0' in metrics
    async with (
        running(prefill=(), decode=(), settings={"gateway_listen": "127.0.0.1:0"}) as stack,
        aiohttp.ClientSession() as session,
    ):
        empty = Client(stack, session, "127.0.0.1")
        assert (await empty.get("/health/live")).status == 200
        assert (await empty.get("/health")).status == 503
        reply = await empty.chat()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")


async def test_the_wire_of_whole_and_streamed_turns() -> None:
    async with gateway(tell_cached_tokens=False) as client:
        streamed = await client.chat(stream=True)
        assert streamed.raw == b"".join(b"data: %s\n\n" % data for data in [*CHUNKS, b"[DONE]"])
        assert not client.stack["d0"].decodes[0].whole
        client.stack["d0"].chunks = [b'{"whole":1}']
        whole = await client.chat()
        assert whole.raw == b'{"whole":1}'
        assert client.stack["d0"].decodes[1].whole


async def test_the_time_of_a_whole_answer_is_no_waiting_time() -> None:
    async with gateway() as client:
        (found,) = client.stack.router.pool.candidates(MODEL, DECODE)
        client.stack["d0"].chunks = [b'{"whole":1}']
        await client.chat()
        assert found.load.calm_at == 0  # no wait was seen
        client.stack["d0"].chunks = CHUNKS
        await client.chat(stream=True)
        assert found.load.calm_at > 0


async def test_tokenizing_says_nothing_of_the_workers_health() -> None:
    async with gateway(worker_cooldown_seconds=0) as client:
        pool = client.stack.router.pool
        unreachable = UnavailableError("no engine", reason="ENGINE_UNREACHABLE")
        with pytest.raises(UnavailableError), pool.use("d0"):
            raise unreachable
        assert (await client.post("/tokenize", {"model": MODEL, "prompt": "x"})).status == 200
        assert pool.breakers(BreakerState.HALF_OPEN) == 1
