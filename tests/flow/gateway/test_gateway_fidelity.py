"""What a client gets through kvloop is what the engine says, by FAULTS row.

The same request goes to a decode engine directly and through the gateway.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.flow.gateway.fleet import CHAT, COMPLETIONS, Fleet, HttpReply, fleet
from tests.flow.sim.engines import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOLATILE = {"id", "created"}
"""Differ between any two requests."""
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
HI = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path_factory.mktemp("fleet"), tell_cached_tokens=False) as running:
        yield running


async def _direct(stack: Fleet, path: str, body: Any) -> HttpReply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{stack.decode.url}{path}"
    async with stack.session.post(
        url, data=data, headers={"content-type": "application/json"}
    ) as reply:
        return HttpReply(reply.status, reply.headers, await reply.read())


def _comparable(value: Any) -> Any:
    """The value without what differs anyway, and without internal members."""
    if isinstance(value, dict):
        dropped = VOLATILE | {"kv_transfer_params", "ec_transfer_params"}
        return {k: _comparable(v) for k, v in value.items() if k not in dropped}
    return [_comparable(entry) for entry in value] if isinstance(value, list) else value


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (CHAT, {"messages": HI}),
    "tools": (CHAT, {"messages": HI, "tools": [TOOL]}),
    "tool_required": (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "required"}),
    "tool_named": (
        CHAT,
        {
            "messages": HI,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
    ),
    "logprobs": (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2}),
    "n": (CHAT, {"messages": HI, "n": 3}),
    "stop": (CHAT, {"messages": HI, "stop": ["\n", "zz"]}),
    "json": (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}),
    "token_ids": (CHAT, {"messages": HI, "return_token_ids": True}),
    "null_content": (
        CHAT,
        {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": []}, *HI]},
    ),
    "vendor_member": (CHAT, {"messages": HI, "x_vendor": {"a": [1.50, None]}}),
    "completion": (COMPLETIONS, {"prompt": "hello"}),
    "completion_tokens": (COMPLETIONS, {"prompt": [1, 2, 3]}),
    "completion_logprobs": (COMPLETIONS, {"prompt": "hello", "logprobs": 2}),
    "completion_prompts": (COMPLETIONS, {"prompt": ["hello", "there"]}),
    "completion_echo": (COMPLETIONS, {"prompt": "hello", "echo": True, "logprobs": 1}),
    "prompt_logprobs": (COMPLETIONS, {"prompt": "hello", "prompt_logprobs": 1}),
}


@pytest.mark.parametrize("feature", FEATURES)
async def test_D8_a_whole_reply_is_the_engines(stack: Fleet, feature: str) -> None:
    path, members = FEATURES[feature]
    body = {"model": MODEL, "max_tokens": 12, **members}
    direct, through = await _direct(stack, path, body), await stack.post(path, body)
    assert (through.status, _comparable(through.json)) == (
        direct.status,
        _comparable(direct.json),
    ), direct.json
    assert b"_transfer_params" not in through.raw
    assert through.headers["content-type"] == direct.headers["content-type"].partition(";")[0]


@pytest.mark.parametrize("feature", FEATURES)
async def test_D8_D9_a_stream_is_the_engines(stack: Fleet, feature: str) -> None:
    path, members = FEATURES[feature]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": MODEL, "max_tokens": 12, **options, **members}
    direct, through = await _direct(stack, path, body), await stack.post(path, body)
    if direct.status != 200:  # refused, the same way
        assert (through.status, through.json) == (direct.status, direct.json)
        return
    if feature == "n" or feature == "completion_prompts":  # choices interleave as they please
        assert sorted(map(json.dumps, map(_comparable, through.events))) == sorted(
            map(json.dumps, map(_comparable, direct.events))
        )
    else:
        assert _comparable(through.events) == _comparable(direct.events)
    assert b"_transfer_params" not in through.raw
    assert through.headers["content-type"] == direct.headers["content-type"]


async def test_D8_a_stream_without_usage_gets_none(stack: Fleet) -> None:
    body = {"model": MODEL, "max_tokens": 5, "stream": True, "messages": HI}
    assert all(
        "usage" not in event or not event["usage"]
        for event in (await stack.post(CHAT, body)).events
    )


@pytest.mark.parametrize(
    ("path", "members"),
    [
        (CHAT, {"messages": [{"role": "user", "content": 7}]}),
        (CHAT, {"messages": HI, "tool_choice": "required"}),
        (COMPLETIONS, {"prompt": [10**9]}),
        (COMPLETIONS, {"prompt": list(range(1, 40_000))}),
    ],
)
async def test_D8_refusals_of_the_engine_have_its_status_and_body(
    stack: Fleet, path: str, members: dict[str, Any]
) -> None:
    body = {"model": MODEL, "max_tokens": 5, **members}
    direct, through = await _direct(stack, path, body), await stack.post(path, body)
    assert direct.status != 200
    assert through.status == direct.status
    if "prompt" not in members or len(members["prompt"]) == 1:  # kvloop counts long ones itself
        assert through.raw == direct.raw


async def test_tokenize_is_the_engines(stack: Fleet) -> None:
    for body in ({"model": MODEL, "prompt": "hello there"}, {"prompt": "x"}, {"messages": HI}):
        direct = await _direct(stack, "/tokenize", body)
        through = await stack.post("/tokenize", body)
        assert (through.status, through.raw) == (direct.status, direct.raw)
    assert (await stack.post("/tokenize", {"model": "other", "prompt": "x"})).status == 404
    bad = {"prompt": 7}
    direct, through = await _direct(stack, "/tokenize", bad), await stack.post("/tokenize", bad)
    assert (through.status, through.raw) == (direct.status, direct.raw)
