"""Which conversation a request belongs to, and whose it is, by FAULTS row."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvloop import AsyncClient, Client, rpc
from kvloop.errors import UnauthenticatedError
from kvloop.router.v1 import router_pb2, router_pb2_grpc
from tests.flow.gateway.fleet import CHAT, COMPLETIONS, PREAMBLE, Fleet, HttpReply, fleet
from tests.flow.sim.engines import MODEL

KEY_A, KEY_B = "sk-a", "sk-b"


def _auth(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _line(tenant: str, key: str) -> str:
    return f"{tenant} {hashlib.sha256(key.encode()).hexdigest()}"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as running:
        yield running


@pytest.fixture
async def two_tenants(tmp_path: Path) -> AsyncIterator[Fleet]:
    keys = f"{_line('a', KEY_A)},{_line('b', KEY_B)}"
    async with fleet(tmp_path, api_keys=keys) as running:
        yield running


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(reply: HttpReply) -> dict[str, Any]:
    message: dict[str, Any] = reply.json["choices"][0]["message"]
    return message


def _hit(reply: HttpReply) -> bool:
    return reply.headers["x-kvloop-handle-hit"] == "true"


def _miss(reply: HttpReply) -> str:
    return reply.headers["x-kvloop-miss-reason"]


@pytest.mark.parametrize("header", ["X-Conversation-ID", "X-Session-ID", None])
async def test_body_and_headers_name_the_same_conversation(
    stack: Fleet, header: str | None
) -> None:
    first = await stack.chat([_user(PREAMBLE)], conversation_id="c")
    named = {header: "c"} if header else {}
    more = {} if header else {"conversation_id": "c"}
    history = [_user(PREAMBLE), _said(first), _user("more")]
    assert _hit(await stack.chat(history, named, **more))


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-conversation-id": "a"}, {"conversation_id": "b"}),
        ({"x-session-id": "a"}, {"conversation_id": "b"}),
        ({"x-session-id": "a", "x-conversation-id": "b"}, {}),
    ],
)
async def test_two_names_for_one_conversation_are_refused(
    stack: Fleet, headers: Mapping[str, str], body: dict[str, Any]
) -> None:
    reply = await stack.chat([_user("hi")], headers, **body)
    assert reply.status == 400
    assert "different conversations" in reply.error["message"]
    assert await stack.prefill.metric("vllm:prompt_tokens_total") == 0


async def test_one_name_said_twice_is_fine(stack: Fleet) -> None:
    headers = {"x-session-id": "a", "x-conversation-id": "a"}
    assert (await stack.chat([_user("hi")], headers, conversation_id="a")).status == 200


async def test_A8_conversations_on_one_worker_do_not_share_a_row(stack: Fleet) -> None:
    x = await stack.chat([_user(PREAMBLE + "x")], conversation_id="x")
    y = await stack.chat([_user(PREAMBLE + "y")], conversation_id="y")
    again = await stack.chat([_user(PREAMBLE + "x"), _said(x), _user("more")], conversation_id="x")
    assert _hit(again)
    assert int(again.headers["x-kvloop-recomputed-tokens"]) < 40
    assert _hit(
        await stack.chat([_user(PREAMBLE + "y"), _said(y), _user("more")], conversation_id="y")
    )


async def test_A8_two_clients_with_one_long_preamble_do_not_meet(stack: Fleet) -> None:
    """Without ids: each finds its own turn, though all but the last words are equal."""
    system = {"role": "system", "content": PREAMBLE}
    histories = [[system, _user(f"I am client {name}")] for name in ("a", "b")]
    for history in histories:
        reply = await stack.chat(history, max_tokens=100)
        assert _miss(reply) == "FIRST_TURN"
        history += [_said(reply), _user("more")]
    for history in histories:
        reply = await stack.chat(history, max_tokens=5)
        assert _hit(reply)
        assert int(reply.headers["x-kvloop-pulled-tokens"]) >= 96
        assert reply.headers["x-kvloop-turn"] == "2"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda h: [_user("no, " + PREAMBLE), *h[1:]], "HISTORY_UNKNOWN"),
        (lambda h: [h[0], {**h[1], "content": "edited"}, h[2]], "HISTORY_UNKNOWN"),
        (lambda h: [{"role": "user", "content": "summary"}, h[1], h[2]], "HISTORY_UNKNOWN"),
        (lambda h: [h[0], _user("start over")], "FIRST_TURN"),
    ],
)
async def test_A7_an_edited_history_without_an_id_is_a_named_miss(
    stack: Fleet, edit: Any, reason: str
) -> None:
    first = await stack.chat([_user(PREAMBLE)])
    history = [_user(PREAMBLE), _said(first), _user("more")]
    reply = await stack.chat(edit(history), max_tokens=5)
    assert reply.status == 200
    assert _miss(reply) == reason


async def test_A15_a_branch_without_an_id_gets_a_named_miss(stack: Fleet) -> None:
    first = await stack.chat([_user(PREAMBLE)])
    history = [_user(PREAMBLE), _said(first)]
    assert _hit(await stack.chat([*history, _user("this way")], max_tokens=5))
    other = await stack.chat([*history, _user("that way")], max_tokens=5)
    assert _miss(other) in ("SPENT", "TAKEN")


async def test_A9_one_id_of_two_tenants_is_two_conversations(two_tenants: Fleet) -> None:
    stack = two_tenants
    first = await stack.chat([_user(PREAMBLE)], _auth(KEY_A), conversation_id="default")
    history = [_user(PREAMBLE), _said(first), _user("more")]
    b = await stack.chat(history, _auth(KEY_B), conversation_id="default", max_tokens=5)
    assert _miss(b) == "FIRST_TURN"
    a = await stack.chat(history, _auth(KEY_A), conversation_id="default", max_tokens=5)
    assert _hit(a)


async def test_A9_a_tenant_cannot_end_anothers_conversation(two_tenants: Fleet) -> None:
    stack = two_tenants
    await stack.chat([_user(PREAMBLE)], _auth(KEY_A), conversation_id="c")
    request = router_pb2.EndConversationRequest(model=MODEL, conversation_id="c")
    async with rpc.open_channel(f"127.0.0.1:{stack.router.port}") as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(UnauthenticatedError), rpc.typed_errors():
            await stub.EndConversation(request)
        by_b = await stub.EndConversation(request, metadata=[("authorization", f"Bearer {KEY_B}")])
        by_a = await stub.EndConversation(request, metadata=[("authorization", f"Bearer {KEY_A}")])
    assert (by_b.found, by_b.released) == (False, False)
    assert (by_a.found, by_a.released) == (True, True)


async def test_A10_equal_histories_of_two_tenants_do_not_meet(two_tenants: Fleet) -> None:
    stack = two_tenants
    first = await stack.chat([_user(PREAMBLE)], _auth(KEY_A))
    history = [_user(PREAMBLE), _said(first), _user("more")]
    assert _miss(await stack.chat(history, _auth(KEY_B), max_tokens=5)) == "HISTORY_UNKNOWN"
    assert _hit(await stack.chat(history, _auth(KEY_A), max_tokens=5))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_A11_prefix_caches_of_engines_do_not_leak_between_tenants(
    two_tenants: Fleet, path: str
) -> None:
    """Same prompt, same forged salt: the tenant behind the key decides."""
    prompt = {"messages": [_user(PREAMBLE)]} if path == CHAT else {"prompt": PREAMBLE}
    body = {"model": MODEL, "max_tokens": 2, "cache_salt": "forged", **prompt}
    cached = []
    for key in (KEY_A, KEY_B, KEY_B):
        reply = await two_tenants.post(path, body, {**_auth(key), "x-tenant": "a"})
        cached.append(int(reply.headers["x-kvloop-cached-tokens"]))
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


async def test_A11_a_callers_salts_stay_apart(stack: Fleet) -> None:
    cached = []
    for salt in ("a", "b", "b"):
        reply = await stack.chat([_user(PREAMBLE)], cache_salt=salt, max_tokens=2)
        cached.append(int(reply.headers["x-kvloop-cached-tokens"]))
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "member",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}},
        {"kv_transfer_params": None},
        {"ec_transfer_params": {}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ],
)
async def test_C7_transfer_params_of_a_client_are_refused(
    stack: Fleet, path: str, member: dict[str, Any]
) -> None:
    prompt = {"messages": [_user("hi")]} if path == CHAT else {"prompt": "hi"}
    for stream in (False, True):
        reply = await stack.post(path, {"model": MODEL, "stream": stream, **prompt, **member})
        assert reply.status == 400
        assert "internal" in reply.error["message"]
    assert await stack.prefill.metric("vllm:prompt_tokens_total") == 0
    assert (await stack.post("/tokenize", {"prompt": "x", **member})).status == 400 or (
        "vllm_xargs" in member
    )


async def test_without_a_valid_key_nothing_is_answered(two_tenants: Fleet) -> None:
    stack = two_tenants
    for headers in ({}, _auth("wrong"), {"authorization": "Basic x"}, {"authorization": "Bearer"}):
        reply = await stack.chat([_user("hi")], headers)
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.error["code"] == 401
        assert (await stack.get("/v1/models", headers)).status == 401
        assert (await stack.post("/tokenize", {"prompt": "x"}, headers)).status == 401
    assert (await stack.get("/health")).status == 200
    assert (await stack.get("/v1/models", _auth(KEY_A))).status == 200


@pytest.mark.parametrize("from_environment", [False, True])
async def test_kvloops_own_clients_send_their_key(
    two_tenants: Fleet, monkeypatch: pytest.MonkeyPatch, from_environment: bool
) -> None:
    address = f"127.0.0.1:{two_tenants.router.port}"
    if from_environment:
        monkeypatch.setenv("KVLOOP_API_KEY", KEY_A)
    key = None if from_environment else KEY_A
    async with AsyncClient(address, api_key=key) as client:
        answer = await client.chat([_user("hi")], model=MODEL, max_tokens=3).collect()
        assert answer.usage.completion_tokens == 3
        assert await client.models()
    with Client(address, api_key=key) as blocking:
        assert await asyncio.to_thread(blocking.models)
    with Client(address, api_key="wrong") as blocking, pytest.raises(UnauthenticatedError):
        await asyncio.to_thread(blocking.models)


async def test_limits_tell_grpc_clients_when_to_ask_again(tmp_path: Path) -> None:
    async with fleet(tmp_path, rate_limit="1/minute") as stack:
        request = router_pb2.ChatRequest(
            model=MODEL, messages=[router_pb2.ChatMessage(role="user", content="hi")]
        )
        request.sampling.max_tokens = 1
        async with rpc.open_channel(f"127.0.0.1:{stack.router.port}") as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            assert [event async for event in stub.Chat(request)]
            with pytest.raises(grpc.RpcError) as caught:
                [event async for event in stub.Chat(request)]
    status = rpc_status.from_call(cast("grpc.Call", caught.value))
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.seconds == 60


async def test_ids_of_clients_come_back_and_are_not_used(stack: Fleet) -> None:
    reply = await stack.chat([_user("hi")], {"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    assert b"mine-1" not in reply.raw
    reply = await stack.chat([_user("hi")], request_id="mine-2")
    assert reply.headers["x-request-id"] == "mine-2"
    assert b"mine-2" not in reply.raw
    assert len(reply.headers["x-kvloop-turn-id"]) == 32


async def test_chats_without_an_id_retain_nothing_if_that_is_switched_off(tmp_path: Path) -> None:
    async with fleet(tmp_path, derive_conversations=False) as stack:
        reply = await stack.chat([_user(PREAMBLE)])
        assert _miss(reply) == "NO_CONVERSATION"
        await stack.decode.until(lambda state: state["pins"] == [])


async def test_reuse_can_be_switched_off_by_a_request(stack: Fleet) -> None:
    reply = await stack.chat([_user(PREAMBLE)], disable_reuse=True)
    assert _miss(reply) == "REUSE_DISABLED"
    assert reply.headers["x-kvloop-retained-tokens"] == "0"
