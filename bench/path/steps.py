"""kvloop's own code on the way of one second turn with a long prompt, in one process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvloop.requests import chat_request, generate_request
from services.router.request import chat_turn, generate_turn
from services.worker import decode_body, handoff, legs, prefill_body, proof
from services.worker.engine import Api

_BLOCK_SIZE = 16
_CHARACTERS_PER_TOKEN = 4
_MESSAGES = 40
_SALT = "conversation"
_EXTRA = {"cache_salt": _SALT, "return_token_ids": True}


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        where: process that takes it.
        what: in words.
        in_bare: the bare protocol takes it too.
        run: takes it once.
    """

    where: str
    what: str
    in_bare: bool
    run: Callable[[], object]


def token_steps(num_tokens: int, source: random.Random) -> list[Step]:
    """The way of a prompt that is token ids.

    Args:
        num_tokens: its length.
        source: of the tokens.
    """
    prompt = [source.randrange(10, 150_000) for _ in range(num_tokens)]

    def request() -> Any:
        return generate_request(
            prompt,
            {"max_tokens": 64},
            model="m",
            conversation_id=_SALT,
            extra_body=_EXTRA,
            client_request_id="",
            disable_reuse=False,
        )

    asked = request()
    turn = generate_turn(asked)
    assert turn.prompt is not None
    place = legs.Prompt("prompt", turn.prompt.start, turn.prompt.end)
    keys = proof.ExtraKeys(lambda start, _: None if start else _SALT, [(0, 1)])
    return [
        Step("client", "make the request", True, request),
        Step("router", "read it, make the engine's body", False, lambda: generate_turn(asked)),
        *_legs(Api.COMPLETIONS, turn.body_json, place, prompt, keys),
        *_engine(prompt, keys, turn.body_json),
    ]


def chat_steps(num_tokens: int, source: random.Random) -> list[Step]:
    """The way of chat messages of as many tokens. Engines tokenize them in addition."""
    size = num_tokens * _CHARACTERS_PER_TOKEN // _MESSAGES
    text = "".join(source.choices("abcdefgh ijklmnop", k=size))
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number in range(_MESSAGES)
    ]

    def request() -> Any:
        return chat_request(
            messages,
            {"max_tokens": 64},
            model="m",
            conversation_id=_SALT,
            tools=[],
            tool_choice=None,
            extra_body=_EXTRA,
            client_request_id="",
            disable_reuse=False,
        )

    asked = request()
    turn = chat_turn(asked)
    place = None
    if turn.prompt is not None:
        place = legs.Prompt("messages", turn.prompt.start, turn.prompt.end)
    prompt = [source.randrange(10, 150_000) for _ in range(num_tokens)]
    return [
        Step("client", "make the request", True, request),
        Step("router", "read it, make the engine's body", False, lambda: chat_turn(asked)),
        *_legs(Api.CHAT_COMPLETIONS, turn.body_json, place, prompt, None),
    ]


def _legs(
    api: Api,
    body: bytes,
    place: legs.Prompt | None,
    prompt: list[int],
    keys: proof.ExtraKeys | None,
) -> list[Step]:
    handle = json.dumps(_params(prompt, keys)).encode()
    handed = _params(prompt, None, PROOF=None) | {"kvloop_report": {"prompt_tokens": len(prompt)}}
    reply = json.dumps(
        {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1}, "kv_transfer_params": handed}
    ).encode()

    def prefill() -> bytes:
        head = prefill_body.read_prefill_body(api, body, place)
        return head + prefill_body.rest_of_prefill_body(turn_id="t", handle=handle)

    def decode() -> bytes:
        read = decode_body.read_decode_body(api, body, whole=False, prompt=place)
        params = handoff.read_reply(reply).params
        return read.head + decode_body.rest_of_body(turn_id="t", params=params, retain=True)

    return [
        Step("prefill sidecar", "make the leg's body with the handle", False, prefill),
        Step("prefill sidecar", "read the reply", False, lambda: handoff.read_reply(reply)),
        Step("decode sidecar", "make the leg's body", False, decode),
    ]


def _engine(prompt: list[int], keys: proof.ExtraKeys, body: bytes) -> list[Step]:
    made = proof.make_proof(prompt, _BLOCK_SIZE, keys)
    params = made.to_params()

    def prove() -> int:
        read = proof.Proof.from_params(params)
        assert read is not None
        return proof.proven_tokens(read, prompt, keys)

    return [
        Step("prefill engine", "prove the prompt", False, prove),
        Step("either engine", "read the body (json)", True, lambda: json.loads(body)),
        Step(
            "decode engine",
            "make the proof, behind the answer",
            False,
            lambda: proof.make_proof(prompt, _BLOCK_SIZE, keys),
        ),
    ]


def _params(prompt: list[int], keys: proof.ExtraKeys | None, **more: Any) -> dict[str, Any]:
    """Transfer params of the size that vLLM's have."""
    blocks = -(-len(prompt) // _BLOCK_SIZE)
    found = {
        "do_remote_decode": True,
        "remote_block_ids": [list(range(3000, 3000 + blocks))],
        "remote_engine_id": "engine",
        "remote_request_id": "request",
        "remote_num_tokens": len(prompt),
        **more,
    }
    if not more:
        found[proof.PROOF] = proof.make_proof(prompt, _BLOCK_SIZE, keys).to_params()
    return found
