"""Random bodies and chunks from a seed, cheap enough for ten thousand of them."""

from __future__ import annotations

import json
import random
from typing import Any

from kvloop.common.v1 import common_pb2
from services.router.openai_fields import known_members

_PROMPTS = {
    common_pb2.API_CHAT_COMPLETIONS: "messages",
    common_pb2.API_COMPLETIONS: "prompt",
    common_pb2.API_RESPONSES: "input",
}
APIS = tuple(_PROMPTS)
OWN = ("conversation_id", "disable_reuse", "request_id")
"""Members that are for kvloop alone."""

_TEXTS = ("", "a", "user", "你好👍", "\x00", "\ud83d", '"', "\\", "\n", "data: ", "x" * 300, "m")
_NUMBERS = (0, 1, -1, 2, 17, 2**63, -(2**70), 0.5, 1e300, -0.0, 1.0)


def value(rng: random.Random, depth: int = 3) -> Any:
    """Any JSON value."""
    kind = rng.randrange(7 if depth else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind <= 2:
        return rng.choice(_NUMBERS)
    if kind <= 4:
        return "".join(rng.choices(_TEXTS, k=rng.randrange(3)))
    if kind == 5:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    names = (rng.choice(_TEXTS) for _ in range(rng.randrange(4)))
    return {name: value(rng, depth - 1) for name in names}


def body(rng: random.Random) -> tuple[common_pb2.Api.ValueType, bytes]:
    """A request body that is right, nearly right, or nothing of the kind."""
    api = rng.choice(APIS)
    members: dict[str, Any] = {"model": "m"}
    if api == common_pb2.API_CHAT_COMPLETIONS:
        members["messages"] = [_message(rng) for _ in range(rng.randrange(1, 4))]
    elif api == common_pb2.API_COMPLETIONS:
        prompts = ("hello", [1, 2, 3], ["a", "b"], [[1], [2]], "long" * 300, [[7] * 300])
        members["prompt"] = rng.choice(prompts)
    else:
        items = [_item(rng) for _ in range(rng.randrange(4))]
        members["input"] = rng.choice(("hello", items, items))
    names = [*known_members(api), *OWN, "kv_transfer_params", "vendor", "model", _PROMPTS[api]]
    for name in rng.sample(names, rng.choice((0, 0, 1, 1, 2, 3))):
        members[name] = value(rng)
    data = json.dumps(members, ensure_ascii=rng.random() < 0.8).encode(errors="surrogatepass")
    damage = rng.random()
    if damage < 0.02:
        return api, rng.randbytes(rng.randrange(40))
    if damage < 0.1:
        place = rng.randrange(len(data))
        data = data[:place] + rng.randbytes(rng.randrange(3)) + data[place + 1 :]
    return api, data


def headers(rng: random.Random) -> dict[str, str]:
    """Headers that mean something to the gateway."""
    names = ("x-conversation-id", "x-session-id", "x-request-id", "authorization")
    values = ("", "a", "b", "Bearer x", "\xff", "\t", "x" * 300)
    chosen = rng.sample(names, rng.choice((0, 0, 1, 2)))
    return {name: rng.choice(values) for name in chosen}


def chunk(rng: random.Random) -> bytes:
    """A chunk as engines write them: compact, on one line, in UTF-8."""
    names = ("choices", "usage", "id", "x")
    members = {name: value(rng) for name in rng.sample(names, rng.randrange(4))}
    text = json.dumps(members, ensure_ascii=rng.random() < 0.5, separators=(",", ":"))
    return text.encode(errors="replace")


def event(rng: random.Random) -> bytes:
    """An event of a response's stream, as engines write it."""
    members = {
        name: value(rng) for name in rng.sample(("delta", "response", "x"), rng.randrange(4))
    }
    members["type"] = rng.choice(("response.created", "response.completed", "error", "你", "a\nb"))
    return json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _item(rng: random.Random) -> Any:
    kinds = ("message", "function_call", "function_call_output", "reasoning", "custom", None)
    item = _message(rng)
    if isinstance(item, dict) and (kind := rng.choice(kinds)) is not None:
        item["type"] = kind
        for name in rng.sample(("arguments", "call_id", "output", "input"), rng.randrange(3)):
            item[name] = value(rng)
    return item


def _message(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return value(rng)
    message: dict[str, Any] = {"role": rng.choice(("user", "assistant", "tool", "system"))}
    for name in rng.sample(("content", "name", "tool_calls", "tool_call_id"), rng.randrange(4)):
        message[name] = value(rng)
    return message
