"""A GenerateRequest becomes an OpenAI body, or an error that names the field."""

from __future__ import annotations

import pytest

from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError
from kvloop.router.v1 import router_pb2
from services.router.request import generate_turn

Request = router_pb2.GenerateRequest


def test_text_prompt() -> None:
    turn = generate_turn(Request(model="m", text="once"))
    assert turn.body_json == b'{"model":"m","prompt":"once"}'
    assert (turn.prompt_path, turn.prompt_tokens) == ("text", None)
    assert turn.api == common_pb2.API_COMPLETIONS


def test_token_prompt() -> None:
    turn = generate_turn(Request(model="m", token_ids=router_pb2.TokenIds(ids=[5, 0, 2**31])))
    assert turn.body_json == b'{"model":"m","prompt":[5,0,2147483648]}'
    assert (turn.prompt_path, turn.prompt_tokens) == ("token_ids", 3)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(model="m"), "text"),
        (Request(model="m", text=""), "text"),
        (Request(model="m", token_ids=router_pb2.TokenIds()), "token_ids"),
        (Request(text="x"), "model"),
        (Request(model="m", text="x", conversation_id="x" * 257), "conversation_id"),
    ],
)
def test_bad_field_is_named(request_, field) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        generate_turn(request_)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "reason", "retains"),
    [
        ({}, "NO_CONVERSATION", False),
        ({"conversation_id": "c"}, "UNSPECIFIED", True),
        ({"conversation_id": "c", "disable_reuse": True}, "REUSE_DISABLED", False),
        ({"conversation_id": "c", "extra_body_json": b'{"n":2}'}, "UNSUPPORTED", False),
    ],
)
def test_why_the_ledger_is_not_asked(fields, reason, retains) -> None:
    turn = generate_turn(Request(model="m", text="x", **fields))
    assert turn.miss_reason == common_pb2.MissReason.Value(f"MISS_REASON_{reason}")
    assert turn.retains is retains
