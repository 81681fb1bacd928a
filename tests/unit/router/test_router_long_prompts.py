"""Long prompts are counted and placed without being taken apart."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError
from kvloop.router.v1 import router_pb2
from services.router.body import encode, parse_object, place_of
from services.router.gateway.requests import ReadingRules, read_request
from services.router.history import beginning_id
from services.router.identity import ANYONE
from services.router.request import generate_turn
from services.router.token_ids import count_token_ids

RULES = ReadingRules(derive_conversations=True, tell_cached_tokens=True)


@given(
    ids=st.lists(st.integers(0, 2**40)),
    gaps=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", ":")]),
    around=st.sampled_from(["", " ", "\n\t"]),
)
def test_token_ids_are_counted(ids, gaps, around) -> None:
    text = around + json.dumps(ids, separators=gaps) + around
    assert count_token_ids(text.encode()) == len(ids)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"null", b"7", b"{}", b'"[1,2]"', b"[-1]", b"[1.0]", b"[1e3]", b"[true]"),
        *(b'["a"]', b"[[1,2]]", b"[1],[2]", b"1[]2", b"][", b"[1]}", b'[1],"kv_transfer_params":1'),
    ],
)
def test_anything_else_is_not_token_ids(text) -> None:
    assert count_token_ids(text) is None


names = st.sampled_from(["model", "prompt", "messages", "é", 'q"uote', "stop"])


@given(
    st.dictionaries(names, st.recursive(st.integers() | st.text(), st.lists, max_leaves=5)),
    names,
)
def test_the_place_of_a_member_is_where_its_value_lies(members, name) -> None:
    raw = parse_object(json.dumps(members).encode(), "body")
    place = place_of(raw, name)
    if name not in members:
        assert place is None
        return
    assert place is not None
    assert encode(raw)[place.start : place.end] == bytes(raw[name])


def test_token_ids_reach_the_body_as_they_came() -> None:
    text = json.dumps([random.Random(1).randrange(150_000) for _ in range(5000)]).encode()
    turn = generate_turn(router_pb2.GenerateRequest(model="m", token_ids_json=text))
    assert (turn.prompt_tokens, turn.prompt_path) == (5000, "token_ids_json")
    assert turn.prompt is not None
    assert turn.body_json[turn.prompt.start : turn.prompt.end] == text
    body = b'{"model":"m","prompt":%s,"max_tokens":1}' % text
    over_http = read_request(common_pb2.API_COMPLETIONS, body, {}, ANYONE, RULES)
    assert (over_http.prompt_tokens, over_http.prompt_path) == (5000, "prompt")
    assert over_http.prompt is not None
    assert over_http.body_json[over_http.prompt.start : over_http.prompt.end] == text


@pytest.mark.parametrize("text", [b"[]", b"[1.5]", b'"text"', b"[1],[2]"])
def test_what_is_no_list_of_token_ids_is_refused(text) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        generate_turn(router_pb2.GenerateRequest(model="m", token_ids_json=text))
    assert caught.value.metadata["field"] == "token_ids_json"


def test_a_conversation_is_recognised_by_token_ids_that_were_not_decoded() -> None:
    ids = list(range(1000))
    body = msgspec.json.encode({"model": "m", "prompt": ids})
    turn = read_request(common_pb2.API_COMPLETIONS, body, {}, ANYONE, RULES)
    assert turn.conversation_id == beginning_id(ids, None) != ""


@pytest.mark.parametrize("path", ["messages", "input"])
def test_messages_and_inputs_are_placed_too(path) -> None:
    api = common_pb2.API_CHAT_COMPLETIONS if path == "messages" else common_pb2.API_RESPONSES
    value = b'[{"role":"user","content":"h\\u00e4"}]'
    body = b'{"model":"m", "%s" : %s, "temperature":1.50}' % (path.encode(), value)
    turn = read_request(api, body, {}, ANYONE, RULES)
    assert turn.prompt is not None
    assert turn.body_json[turn.prompt.start : turn.prompt.end] == value
