"""The relay benchmark's engines say what vLLM says, and its clients time it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.relay import prompts, replies
from bench.relay.cases import Round
from bench.relay.clients import BareWay, HttpWay, LegsWay, Timing, connect, open_channel
from bench.relay.fake_engine import Connection, FakeEngine
from bench.relay.report import records
from kvloop.worker.v1 import worker_pb2
from services.worker.engine import Api
from services.worker.event_messages import Finished, Hello, read_line, request_id_of
from services.worker.handoff import read_reply
from services.worker.http_engine import open_engine
from services.worker.proof import Proof

CLOCK = time.perf_counter


@asynccontextmanager
async def _engine(role: str) -> AsyncIterator[tuple[FakeEngine, int]]:
    engine = FakeEngine(role)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", 0)
    async with server:
        yield engine, server.sockets[0].getsockname()[1]


@asynccontextmanager
async def _services() -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.relay.fake_services", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("gap_us", [0, 500])
async def test_a_stream_has_its_tokens_and_its_end(gap_us: int) -> None:
    async with _engine("decode") as (_, port):
        connection = await connect(port, CLOCK)
        timing = Timing(CLOCK())
        prompt = prompts.small(300, gap_us)
        for _ in range(2):  # the connection is kept
            body = await connection.post(prompt.path, prompt.body(), timing)
            assert body.count(b'"content":" token"') == 300
            assert body.count(b"data: [DONE]") == 1
        assert timing.ttft > 0
        connection.close()


async def test_both_legs_reach_their_engines_and_the_sidecar_hears_of_the_turn() -> None:
    async with _engine("prefill") as (_, prefill_port), _engine("decode") as (engine, port):
        told: list[bytes] = []
        engine.send_event = told.append
        lanes = await connect(prefill_port, CLOCK), await connect(port, CLOCK)
        timing = await BareWay(*lanes, CLOCK).run(prompts.long_ids(4))
        assert timing.started < timing.arrivals[0] <= timing.ended
        assert told == []  # no turn id, no event
        await lanes[1].post("/v1/chat/completions", b'{"kvloop_turn_id":"t1"}', timing)
        event = read_line(told[0])
        assert isinstance(event, Finished)
        assert (event.turn_id, event.retained) == ("t1", True)
        assert request_id_of(event.params) == "cmpl-0"
        for lane in lanes:
            lane.close()


async def test_an_engine_reads_bodies_that_come_in_parts() -> None:
    async with _engine("decode") as (engine, port):
        told: list[bytes] = []
        engine.send_event = told.append
        async with open_engine(
            f"http://127.0.0.1:{port}", max_connections=1, connect_timeout_seconds=5
        ) as sidecar:
            for number in range(2):  # the connection is kept
                begun = sidecar.begin(Api.CHAT_COMPLETIONS, b'{"a":1', {})
                async with asyncio.TaskGroup() as group:
                    group.create_task(begun.run())
                    assert await begun.finish(b',"kvloop_turn_id":"t%d"}' % number)
                    async with begun.stream() as batches:
                        assert [batch async for batch in batches]
    assert len(told) == 2


async def test_one_server_is_a_way_too() -> None:
    async with _engine("decode") as (_, port):
        connection = await connect(port, CLOCK)
        timing = await HttpWay(connection, CLOCK).run(prompts.small(4))
        assert timing.ttft >= 0
        connection.close()


async def test_a_stream_one_by_one_has_as_many_tokens() -> None:
    async with _engine("decode") as (_, port):
        connection = await connect(port, CLOCK)
        timing = Timing(CLOCK())
        prompt = prompts.small(300, burst=1)
        body = await connection.post(prompt.path, prompt.body(), timing)
        assert body.count(b'"content":" token"') == 300
        connection.close()


@pytest.mark.parametrize(("tokens", "gap_us", "burst"), [(130, 0, 64), (5, 100, 64), (7, 0, 1)])
async def test_fake_services_stand_in_for_both_legs(tokens: int, gap_us: int, burst: int) -> None:
    async with _services() as port:
        channel = open_channel(port)
        try:
            timing = await LegsWay(channel, CLOCK).run(prompts.small(tokens, gap_us, burst))
            request = prompts.small(tokens, gap_us, burst).leg()
            decode: Any = channel.unary_stream("/kvloop.worker.v1.WorkerService/Decode")
            call = decode(request)
            events = [worker_pb2.DecodeResponse.FromString(data) async for data in call]
        finally:
            await channel.close()
    assert timing.started < timing.arrivals[0] <= timing.ended
    assert events[-1].batch.HasField("summary")
    assert sum(len(event.batch.chunks_json) or 1 for event in events) == tokens + 2


def test_replies_are_what_the_sidecar_reads() -> None:
    for reply, tokens in ((replies.PREFILL_SMALL, 200), (replies.PREFILL_BIG, 33_000)):
        handoff = read_reply(reply.partition(b"\r\n\r\n")[2])
        assert handoff.reported
        assert handoff.report.prompt_tokens == tokens
    hello = read_line(replies.hello("decode"))
    assert isinstance(hello, Hello)


def test_a_handle_carries_a_proof_of_true_size() -> None:
    event = read_line(replies.finished_event("t", 1, 200_000))
    assert isinstance(event, Finished)
    handle = json.loads(bytes(event.params))
    assert Proof.from_params(handle["kvloop_proof"]) is not None


def test_records_hold_medians_and_what_was_added() -> None:
    cpu = dict.fromkeys(("router", "prefill sidecar", "decode sidecar", "kvmeta"), 0.01)

    def a_round(way: str, ttft: float) -> Round:
        return Round("case", way, [ttft], [0.001], 100, 10, 1.0, cpu, {"router": 50.0})

    found = records(
        [a_round("decode", 0.001), a_round("bare", 0.002)]
        + [a_round("http", ttft) for ttft in (0.004, 0.009, 0.005)]
    )
    http = found[-1]
    assert http["way"] == "http"
    assert http["added_to_decode_ms"] == pytest.approx(4.0)
    assert http["added_to_bare_ms"] == pytest.approx(3.0)
    assert http["front_us_per_token"]["median"] == pytest.approx(100.0)
    assert http["path_us_per_token"]["median"] == pytest.approx(400.0)
    assert http["path_ms_per_request"]["median"] == pytest.approx(4.0)
