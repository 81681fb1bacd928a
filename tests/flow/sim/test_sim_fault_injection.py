"""Every fault that can be asked for, seen from the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from services.sim.host import HostState
from tests.flow.sim.engines import (
    CHAT,
    COMPLETIONS,
    FIRST_PREFILL,
    EngineClient,
    engine,
    process,
    prompt,
)
from tests.flow.sim.jump_clock import JumpClock

_BODY = {"prompt": "hello", "max_tokens": 10, "ignore_eos": True}
_CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


def _with(fault: str) -> dict[str, str]:
    return {"X-Sim-Fault": fault}


async def _raw(client: EngineClient, fault: str) -> bytes:
    """The body of a stream, byte for byte, as far as it comes."""
    received = bytearray()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            client.url + COMPLETIONS, json=_BODY | {"stream": True}, headers=_with(fault)
        ) as reply,
    ):
        try:
            async for piece in reply.content.iter_any():
                received += piece
        except aiohttp.ClientError:
            received += b"<cut off>"
    return bytes(received)


async def _next(events: AsyncIterator[Any]) -> Any:
    return await anext(events)


def _texts(body: bytes) -> list[str]:
    lines = body.replace(b"\r\n", b"\n").split(b"\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    return [chunk["choices"][0]["text"] for chunk in chunks if "choices" in chunk]


async def test_an_error_status_comes_before_the_engine_sees_the_request(
    decode: EngineClient,
) -> None:
    reply = await decode.post(COMPLETIONS, _BODY, _with("status;code=429;message=too many"))
    assert reply.status == 429
    assert reply.error == {
        "message": "too many",
        "type": "TooManyRequestsError",
        "param": None,
        "code": 429,
    }
    failed = await decode.post(COMPLETIONS, _BODY, _with("status;code=500"))
    assert failed.error["type"] == "InternalServerError"
    odd = await decode.post(COMPLETIONS, _BODY, _with("status;code=520"))
    assert (odd.status, odd.error["type"]) == (520, "Error")
    assert await decode.metric("vllm:prompt_tokens_total") == 0


async def test_a_dropped_request_gets_no_reply(decode: EngineClient) -> None:
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await decode.post(COMPLETIONS, _BODY, _with("drop"))
    assert (await decode.post(COMPLETIONS, _BODY)).status == 200


async def test_a_hanging_request_ends_with_its_client(decode: EngineClient) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await decode.post(COMPLETIONS, _BODY, _with("hang"))
    await decode.until(lambda state: state["waiting"] == [])


async def test_a_late_first_byte_is_late_and_otherwise_right() -> None:
    clock = JumpClock()
    async with engine(clock=clock) as client:
        right = await client.post(COMPLETIONS, _BODY)
        async with asyncio.TaskGroup() as group:
            late = group.create_task(
                client.post(COMPLETIONS, _BODY, _with("slow_first_byte;seconds=60"))
            )
            while await client.metric("vllm:generation_tokens_total") < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await clock.advance(30)
            assert not late.done()
            await clock.advance(30)
    assert late.result().choice == right.choice


async def test_a_stream_can_die_after_so_many_tokens(decode: EngineClient) -> None:
    whole = _texts(await _raw(decode, ""))
    cut = await _raw(decode, "die;after_tokens=3")
    assert cut.endswith(b"<cut off>")
    assert _texts(cut) == whole[:3]
    assert _texts(await _raw(decode, "die")) == []
    await decode.until(lambda state: state["blocks"]["used"] == 0)


async def test_a_reply_in_one_piece_can_die_too(decode: EngineClient) -> None:
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await decode.post(COMPLETIONS, _BODY, _with("die;after_tokens=3"))


async def test_a_stalled_stream_goes_on_after_the_pause() -> None:
    clock = JumpClock()
    async with engine(clock=clock) as client:
        events = client.events(COMPLETIONS, _BODY, _with("stall;after_tokens=2;seconds=60"))
        texts = [(await anext(events))["choices"][0]["text"] for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            third = group.create_task(_next(events))
            await client.until(lambda state: state["blocks"]["used"] == 0)
            assert not third.done()
            await clock.advance(60)
        rest = [third.result(), *[event async for event in events][:-1]]
        texts += [event["choices"][0]["text"] for event in rest]
        assert texts == _texts(await _raw(client, ""))


async def test_an_engine_error_in_a_stream_is_an_event(decode: EngineClient) -> None:
    *chunks, error, done = await decode.stream(
        COMPLETIONS, _BODY, _with("stream_error;after_tokens=2")
    )
    assert len(chunks) == 2
    assert error["error"]["code"] == 500
    assert done == "[DONE]"
    whole = await decode.post(COMPLETIONS, _BODY, _with("stream_error"))
    assert (whole.status, whole.error["type"]) == (500, "InternalServerError")


@pytest.mark.parametrize("fault", ["byte_by_byte", "crlf", "comments", "byte_by_byte,crlf"])
async def test_odd_framing_carries_the_same_events(decode: EngineClient, fault: str) -> None:
    body = await _raw(decode, fault)
    assert _texts(body) == _texts(await _raw(decode, ""))
    assert (b"\r\n\r\n" in body) is ("crlf" in fault)
    assert body.count(b": keep-alive\n\n") == (11 if fault == "comments" else 0)


async def test_faults_can_come_in_the_body_through_any_proxy(decode: EngineClient) -> None:
    for leg, status in (("decode", 500), ("prefill", 200)):
        xargs = {"sim_fault": f"status;code=500;leg={leg}"}
        assert (await decode.post(CHAT, _CHAT_BODY | {"vllm_xargs": xargs})).status == status


async def test_an_unknown_fault_is_refused_not_ignored(decode: EngineClient) -> None:
    reply = await decode.post(COMPLETIONS, _BODY, _with("explode"))
    assert reply.status == 400
    assert "explode" in reply.error["message"]


async def test_standing_faults_are_added_listed_applied_and_withdrawn(
    decode: EngineClient,
) -> None:
    added = await decode.post(
        "/sim/faults",
        [
            {"kind": "status", "code": 503, "leg": "decode", "count": 1},
            {"kind": "status", "code": 500, "leg": "prefill"},
        ],
    )
    assert [fault["id"] for fault in added.json] == [1, 2]
    assert (await decode.post(COMPLETIONS, _BODY)).status == 503
    assert (await decode.post(COMPLETIONS, _BODY)).status == 200
    refused = await decode.post(COMPLETIONS, _BODY | {"kv_transfer_params": FIRST_PREFILL})
    assert refused.status == 500
    (left,) = (await decode.get("/sim/faults")).json
    assert (left["id"], left["applied"]) == (2, 1)
    assert (await decode.state())["faults_applied"] == {"status": 2}
    assert (await decode.delete("/sim/faults/2")).status == 200
    assert (await decode.delete("/sim/faults/2")).status == 404
    await decode.post("/sim/faults", {"kind": "drop"})
    await decode.delete("/sim/faults")
    assert (await decode.post(COMPLETIONS, _BODY)).status == 200


async def test_a_senseless_standing_fault_is_refused(decode: EngineClient) -> None:
    assert (await decode.post("/sim/faults", {"kind": "explode"})).status == 400
    assert (await decode.post("/sim/faults", {"kind": "die", "seconds": 3})).status == 400
    assert (await decode.post("/sim/engine", {"action": "explode"})).status == 400


async def test_a_refusing_engine_takes_no_connections_and_then_does() -> None:
    clock = JumpClock()
    async with engine(clock=clock) as client, asyncio.TaskGroup() as tasks:
        slow = {"X-Sim-Fault": "hang;seconds=60"}
        under_way = tasks.create_task(client.post(COMPLETIONS, _BODY, slow))
        await client.until(lambda state: "hang" in state["faults_applied"])
        await client.post("/sim/engine", {"action": "refuse", "seconds": 60})
        async with aiohttp.ClientSession() as fresh:
            with pytest.raises(aiohttp.ClientConnectorError):
                await fresh.get(client.url + "/health")
        # Nor does a connection that was idle take another request.
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.state()
        await clock.advance(60)
        assert (await under_way).status == 200
        await client.host.reached(HostState.UP)
        async with aiohttp.ClientSession() as fresh, fresh.get(client.url + "/health") as reply:
            assert reply.status == 200


async def test_an_engine_that_restarts_mid_stream_cuts_it_off_and_comes_back_empty() -> None:
    async with engine(role="decode") as client:
        kept = {"do_remote_prefill": False, "kvloop_turn_id": "t"}
        await client.complete(prompt(100), max_tokens=5, kv_transfer_params=kept)
        before = await client.state()
        assert before["pins"]
        cut = await _raw(client, "restart;after_tokens=2;seconds=0.1")
        assert cut.endswith(b"<cut off>")
        assert len(_texts(cut)) == 2
        after = await client.next_life(before)
    assert (after["engine_id"], after["epoch"]) != (before["engine_id"], before["epoch"])
    assert (after["pins"], after["blocks"]["used"], after["blocks"]["cached"]) == ([], 0, 0)


async def test_a_fixed_engine_id_stays_but_the_epoch_does_not() -> None:
    async with engine(engine_id="mine") as client:
        before = await client.state()
        await client.post("/sim/engine", {"action": "restart"})
        after = await client.next_life(before)
    assert before["engine_id"] == after["engine_id"] == "mine"
    assert before["epoch"] != after["epoch"]


async def test_an_engine_that_exits_can_be_started_again_over_the_admin_port() -> None:
    async with process(engines=2, admin_listen="127.0.0.1:0") as clients:
        admin = f"http://127.0.0.1:{clients[0].process.admin_port}/engines"
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await clients[0].post(COMPLETIONS, _BODY, _with("exit"))
            await clients[0].host.reached(HostState.DOWN)
            async with session.get(admin) as reply:
                assert [host["state"] for host in await reply.json()] == ["down", "up"]
            assert (await clients[1].post(COMPLETIONS, _BODY)).status == 200
            async with session.post(f"{admin}/0", json={"action": "start"}) as reply:
                assert reply.status == 200
            await clients[0].host.reached(HostState.UP)
            assert (await clients[0].post(COMPLETIONS, _BODY)).status == 200
            for path, body, status in (("/0", {"action": "sing"}, 400), ("/9", {}, 404)):
                async with session.post(admin + path, json=body) as reply:
                    assert reply.status == status


@pytest.mark.parametrize(
    ("fault", "policy", "status"),
    [
        ("lose_handshake", "recompute", 200),
        ("fail_transfer", "recompute", 200),
        ("fail_transfer", "fail", 500),
    ],
)
async def test_a_pull_that_fails_is_recomputed_or_fails_the_request(
    prefill: EngineClient, fault: str, policy: str, status: int
) -> None:
    tokens = prompt(200)
    right = await prefill.complete(tokens, max_tokens=5)
    handed = await prefill.complete(tokens, max_tokens=1, kv_transfer_params=FIRST_PREFILL)
    params = handed.json["kv_transfer_params"]
    async with engine(role="decode", kv_load_failure_policy=policy) as decode:
        body = {"prompt": tokens, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
        reply = await decode.post(COMPLETIONS, body | {"kv_transfer_params": params}, _with(fault))
        assert await decode.metric("vllm:nixl_num_failed_transfers_total") == 1
    assert reply.status == status
    if status == 200:
        assert reply.choice["token_ids"] == right.choice["token_ids"]
    # Nobody has read prefill's blocks: they fall with their lease.
    assert len((await prefill.state())["pins"]) == 1


async def test_a_share_of_requests_fails_as_asked() -> None:
    async with engine(fault=["status;code=500;probability=0.3"], seed=7) as client:
        replies = [await client.post(COMPLETIONS, _BODY) for _ in range(60)]
    failed = sum(reply.status == 500 for reply in replies)
    assert 8 <= failed <= 30
