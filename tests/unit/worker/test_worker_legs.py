"""Bodies of the legs: what is changed, and that nothing else is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.errors import InvalidFieldError
from services.worker.engine import Api
from services.worker.legs import (
    Prompt,
    parse_body,
    prompt_token_ids,
    splice,
    tokenize_body,
    unsplittable_field,
)
from services.worker.prefill_body import read_prefill_body, rest_of_prefill_body

HANDLE = (
    b' { "do_remote_decode":true, "remote_block_ids":[[1, 2],[3]],"deadline":12.50,'
    b'"remote_num_tokens":64, "none":null,"text":"\\u4f60" } '
)


def _prefill_body(api: Api, body: bytes, **rest: Any) -> bytes:
    return read_prefill_body(api, body) + rest_of_prefill_body(**rest)


def _prefill(body: bytes, handle: bytes = b"") -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(
        _prefill_body(Api.CHAT_COMPLETIONS, body, turn_id="t1", handle=handle)
    )
    return decoded


def test_prefill_asks_for_one_token_whatever_the_client_asked_for() -> None:
    body = _prefill(
        b'{"model":"m","messages":[],"max_tokens":500,"max_completion_tokens":400,"min_tokens":5,'
        b'"stop":["\\n"],"stop_token_ids":[2],"n":1,"best_of":1,"use_beam_search":false,'
        b'"stream":true,"stream_options":{"include_usage":true},"logprobs":true,'
        b'"top_logprobs":5,"prompt_logprobs":null,"echo":false,"return_token_ids":true,'
        b'"ignore_eos":false,"request_id":"mine"}'
    )
    assert body == {
        "model": "m",
        "messages": [],
        "max_tokens": 1,
        "stream": False,
        "ignore_eos": True,
        "kv_transfer_params": {
            "kvloop_turn_id": "t1",
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_prefill_keeps_what_shapes_the_prompt() -> None:
    kept = {
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True,
        "truncate_prompt_tokens": 100,
        "cache_salt": "s",
        "temperature": 0.5,
        "vendor_field": {"a": [1, None]},
    }
    body = _prefill(json.dumps({"messages": [], **kept}).encode())
    assert kept.items() <= body.items()


def test_prefill_of_a_response_makes_one_token_and_is_not_kept() -> None:
    raw = b'{"input":"x","max_output_tokens":9,"include":["x"],"store":true,"stop":["a"]}'
    body = json.loads(_prefill_body(Api.RESPONSES, raw, turn_id="t1", handle=b""))
    assert body.pop("kv_transfer_params")["do_remote_decode"] is True
    assert body == {
        "input": "x",
        "max_output_tokens": 1,
        "store": False,
        "stream": False,
        "ignore_eos": True,
    }


def test_prefill_carries_the_handle_byte_for_byte() -> None:
    body = _prefill_body(Api.CHAT_COMPLETIONS, b'{"model":"m"}', turn_id="t1", handle=HANDLE)
    assert HANDLE.strip()[1:].lstrip() in body
    assert json.loads(body)["kv_transfer_params"]["kvloop_turn_id"] == "t1"


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"a":', b"\xff"])
def test_a_body_that_is_no_object_names_the_field(body: bytes) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        parse_body(body)
    assert caught.value.field == "body_json"


def test_a_body_that_brings_transfer_params_is_refused() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        parse_body(b'{"kv_transfer_params":{"remote_host":"10.0.0.1"}}')
    assert caught.value.field == "kv_transfer_params"


class TestSplice:
    """splice() sets members and leaves all other bytes alone."""

    def test_empty_object(self) -> None:
        assert splice(b"{ }", {"kvloop_turn_id": "t"}) == b'{"kvloop_turn_id":"t"}'

    def test_never_duplicates_a_key(self) -> None:
        params = b'{"kvloop_turn_id":"old","kvloop_retain":false,"a":[1, 2]}'
        spliced = splice(params, {"kvloop_turn_id": "new", "kvloop_retain": True})
        assert spliced.count(b"kvloop_turn_id") == spliced.count(b"kvloop_retain") == 1
        assert json.loads(spliced) == {"kvloop_turn_id": "new", "kvloop_retain": True, "a": [1, 2]}
        assert b"[1, 2]" in spliced

    def test_a_nested_key_of_that_name_is_left_alone(self) -> None:
        spliced = splice(b'{"a":{"kvloop_turn_id":"x"}}', {"kvloop_turn_id": "t"})
        assert json.loads(spliced) == {"kvloop_turn_id": "t", "a": {"kvloop_turn_id": "x"}}

    @pytest.mark.parametrize("params", [b"null", b"[1]", b"", b'{"kvloop_turn_id"'])
    def test_what_is_no_object_is_refused(self, params: bytes) -> None:
        with pytest.raises(InvalidFieldError) as caught:
            splice(params, {"kvloop_turn_id": "t"})
        assert caught.value.field == "transfer_params_json"

    @given(
        st.dictionaries(
            st.text(max_size=8),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
                max_leaves=8,
            ),
        ),
        st.sampled_from([None, 2]),
    )
    def test_every_other_member_survives(self, params: dict[str, Any], indent: int | None) -> None:
        spliced = json.loads(splice(json.dumps(params, indent=indent).encode(), {"turn": "t"}))
        assert spliced == params | {"turn": "t"}


@pytest.mark.parametrize(
    ("api", "body", "field"),
    [
        (Api.CHAT_COMPLETIONS, b"{}", None),
        (Api.CHAT_COMPLETIONS, b'{"n":1,"best_of":null,"echo":false}', None),
        (Api.CHAT_COMPLETIONS, b'{"n":2}', "n"),
        (Api.CHAT_COMPLETIONS, b'{"n":"2"}', "n"),
        (Api.COMPLETIONS, b'{"best_of":3}', "best_of"),
        (Api.COMPLETIONS, b'{"use_beam_search":true}', "use_beam_search"),
        (Api.COMPLETIONS, b'{"echo":true}', "echo"),
        (Api.COMPLETIONS, b'{"prompt_logprobs":0}', "prompt_logprobs"),
        (Api.COMPLETIONS, b'{"truncate_prompt_tokens":-1}', "truncate_prompt_tokens"),
        (Api.COMPLETIONS, b'{"truncate_prompt_tokens":10}', None),
        (Api.COMPLETIONS, b'{"prompt":"text"}', None),
        (Api.COMPLETIONS, b'{"prompt":[1,2,3]}', None),
        (Api.COMPLETIONS, b'{"prompt":["one"]}', None),
        (Api.COMPLETIONS, b'{"prompt":[ "one","two"]}', "prompt"),
        (Api.COMPLETIONS, b'{"prompt":[[1,2],[3]]}', "prompt"),
        (Api.CHAT_COMPLETIONS, b'{"prompt":["one","two"]}', None),
        (Api.RESPONSES, b'{"input":"x","n":2}', None),
        (Api.RESPONSES, b'{"truncation":"disabled"}', None),
        (Api.RESPONSES, b'{"truncation":"auto"}', "truncation"),
        (Api.RESPONSES, b'{"tools":[{"type":"function"},{"type":"custom"}]}', None),
        (Api.RESPONSES, b'{"tools":[{"type":"function"},{"type":"mcp"}]}', "tools"),
        (Api.RESPONSES, b'{"tools":null}', None),
    ],
)
def test_what_cannot_run_in_two_legs(api: Api, body: bytes, field: str | None) -> None:
    assert unsplittable_field(api, parse_body(body)) == field


def test_tokenizing_sends_only_what_shapes_the_prompt() -> None:
    body = tokenize_body(parse_body(b'{"model":"m","messages":[],"tools":[],"max_tokens":5}'))
    assert msgspec.json.decode(body) == {"model": "m", "messages": [], "tools": []}


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        (b'{"prompt":[5,6]}', [5, 6]),
        (b'{"prompt":"text"}', None),
        (b'{"prompt":[]}', None),
        (b'{"prompt":["a"]}', None),
        (b"{}", None),
    ],
)
def test_token_ids_of_a_prompt(body: bytes, ids: list[int] | None) -> None:
    assert prompt_token_ids(parse_body(body)) == ids


BODIES = [
    b'{"model":"m","prompt":[1,2,3],"max_tokens":1.50}',
    b'{"prompt":[1,2,3]}',
    b'{ "a" : "prompt" , "prompt":[1,2,3]}',
]


@pytest.mark.parametrize("body", BODIES)
def test_a_placed_prompt_gives_the_same_members(body: bytes) -> None:
    start = body.index(b"[")
    members = parse_body(body, Prompt("prompt", start, start + len(b"[1,2,3]")))
    assert list(members.items()) == list(parse_body(body).items())


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("shift", [-1, 1, 40])
def test_a_prompt_in_another_place_is_refused(body: bytes, shift: int) -> None:
    start = body.index(b"[") + shift
    with pytest.raises(InvalidFieldError):
        parse_body(body, Prompt("prompt", start, start + len(b"[1,2,3]")))


def test_a_prompt_under_another_name_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="messages"):
        parse_body(b'{"prompt":[1]}', Prompt("messages", 10, 13))


def test_transfer_params_beside_a_placed_prompt_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="kv_transfer_params"):
        parse_body(b'{"prompt":[1],"kv_transfer_params":{}}', Prompt("prompt", 10, 13))


def test_token_ids_are_handed_over_only_if_asked() -> None:
    for asked in (True, False):
        body = _prefill_body(
            Api.CHAT_COMPLETIONS,
            b'{"model":"m"}',
            turn_id="t",
            handle=HANDLE,
            hand_token_ids_over=asked,
        )
        params = json.loads(body)["kv_transfer_params"]
        assert params.get("kvloop_hand_token_ids_over") is (True if asked else None)
