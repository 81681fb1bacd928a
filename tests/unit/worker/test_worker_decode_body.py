"""What decode's engine is asked for: the client's body, and in the end what prefill left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.errors import InvalidFieldError
from services.worker.decode_body import read_decode_body, rest_of_body, wants_usage_chunk
from services.worker.engine import Api
from services.worker.legs import Prompt, parse_body

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
MEMBERS = st.dictionaries(st.text(max_size=8), VALUES, max_size=5).filter(
    lambda members: (
        not members.keys() & {"kv_transfer_params", "stream_options", "tools", "truncation"}
    )
)


def _raw(
    body: bytes,
    params: bytes = b"",
    *,
    api: Api = Api.CHAT_COMPLETIONS,
    retain: bool = True,
    whole: bool = False,
) -> bytes:
    head = read_decode_body(api, body, whole=whole).head
    return head + rest_of_body(turn_id="t1", params=params, retain=retain)


def _decode(body: bytes, params: bytes = b"", *, retain: bool = True) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(_raw(body, params, retain=retain))
    return decoded


def test_decode_of_a_response_is_the_clients_body_streamed() -> None:
    raw = _raw(b'{"input":"x","max_output_tokens":9}', api=Api.RESPONSES, retain=False)
    assert json.loads(raw) == {"input": "x", "max_output_tokens": 9, "stream": True}
    assert wants_usage_chunk(Api.RESPONSES, parse_body(b'{"stream":true}'))


def test_decode_keeps_the_body_and_switches_stream_and_usage_on() -> None:
    body = _decode(
        b'{"model":"m","max_tokens":9,"stop":["x"],"stream":false,"n":2,'
        b'"stream_options":{"continuous_usage_stats":true,"include_usage":false}}',
        retain=False,
    )
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "stop": ["x"],
        "stream": True,
        "n": 2,
        "stream_options": {"continuous_usage_stats": True, "include_usage": True},
    }


@pytest.mark.parametrize("options", [b"null", b"{}"])
def test_decode_accepts_empty_stream_options(options: bytes) -> None:
    body = _decode(b'{"stream_options":' + options + b"}", retain=False)
    assert body["stream_options"] == {"include_usage": True}


def test_decode_names_stream_options_of_the_wrong_type() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        _decode(b'{"stream_options":[1]}')
    assert caught.value.field == "stream_options"


def test_decode_without_hand_off_asks_the_engine_to_retain() -> None:
    assert _decode(b"{}")["kv_transfer_params"] == {
        "kvloop_turn_id": "t1",
        "do_remote_prefill": False,
        "do_remote_decode": False,
    }


def test_decode_without_hand_off_and_conversation_leaves_no_trace() -> None:
    assert "kv_transfer_params" not in _decode(b"{}", retain=False)


def test_decode_with_hand_off_but_no_conversation_is_not_retained() -> None:
    params = _decode(b"{}", b'{"remote_port":1}', retain=False)["kv_transfer_params"]
    assert params == {"kvloop_turn_id": "t1", "kvloop_retain": False, "remote_port": 1}


def test_untouched_members_stay_byte_for_byte() -> None:
    raw = b'{ "a" : [1, 2.0,\t1e5, {"x":null}], "b":"\\u00e9\\ud83d\\ude00", "c":-0 }'
    body = _raw(raw, retain=False)
    for value in (b'[1, 2.0,\t1e5, {"x":null}]', b'"\\u00e9\\ud83d\\ude00"', b'"c":-0'):
        assert value in body


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b"{}", True),
        (b'{"stream":false}', True),
        (b'{"stream":true}', False),
        (b'{"stream":true,"stream_options":null}', False),
        (b'{"stream":true,"stream_options":{"include_usage":true}}', True),
    ],
)
def test_the_usage_chunk_is_the_clients_only_if_it_asked(body: bytes, wanted: bool) -> None:
    assert wants_usage_chunk(Api.CHAT_COMPLETIONS, parse_body(body)) is wanted


@given(MEMBERS, st.none() | MEMBERS, st.booleans(), st.booleans())
def test_the_parts_and_the_whole_are_objects_that_engines_can_read(
    members: dict[str, Any], handed: dict[str, Any] | None, retain: bool, whole: bool
) -> None:
    """As the header that says how long the head is promises."""
    params = b"" if handed is None else json.dumps(handed, indent=1).encode()
    raw = json.dumps(members).encode()
    body = read_decode_body(Api.CHAT_COMPLETIONS, raw, whole=whole)
    rest = rest_of_body(turn_id="t1", params=params, retain=retain)

    sent = dict(members)
    if not whole:
        sent |= {"stream": True, "stream_options": {"include_usage": True}}
    elif not members:
        sent = {"stream": False}
    added: dict[str, Any] = {}
    if handed is not None:
        added = {**handed, "kvloop_turn_id": "t1"} | ({} if retain else {"kvloop_retain": False})
    elif retain:
        added = {
            "kvloop_turn_id": "t1",
            "do_remote_prefill": False,
            "do_remote_decode": False,
        }
    tail = {"kv_transfer_params": added} if added else {}
    assert json.loads(body.head + b"}") == sent
    assert rest == b"}" if not tail else json.loads(rest.replace(b",", b"{", 1)) == tail
    assert json.loads(body.head + rest) == sent | tail


def test_a_placed_prompt_gives_the_same_head() -> None:
    raw = b'{"model":"m","prompt":[1,2,3],"max_tokens":1.50}'
    start = raw.index(b"[")
    placed = Prompt("prompt", start, start + len(b"[1,2,3]"))
    assert read_decode_body(Api.COMPLETIONS, raw, whole=False, prompt=placed) == read_decode_body(
        Api.COMPLETIONS, raw, whole=False
    )


def test_a_body_for_one_leg_says_which_member_forbids_two() -> None:
    body = read_decode_body(Api.CHAT_COMPLETIONS, b'{"n":2}', whole=False)
    with pytest.raises(InvalidFieldError) as caught:
        body.require_splittable()
    assert (caught.value.reason, caught.value.field) == ("NOT_SPLITTABLE", "n")
