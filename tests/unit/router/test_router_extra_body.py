"""Members of extra_body_json: known ones are checked, the rest passes untouched."""

from __future__ import annotations

import json
from decimal import Decimal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloop.errors import InvalidFieldError
from kvloop.router.v1 import router_pb2
from services.router.request import TurnRequest, chat_turn, generate_turn


def chat(extra: bytes, **fields) -> TurnRequest:
    message = router_pb2.ChatMessage(role="user", content="x")
    return chat_turn(
        router_pb2.ChatRequest(model="m", messages=[message], extra_body_json=extra, **fields)
    )


def complete(extra: bytes, **fields) -> TurnRequest:
    return generate_turn(
        router_pb2.GenerateRequest(model="m", text="x", extra_body_json=extra, **fields)
    )


def fault(extra: bytes, build=chat, **fields) -> str:
    with pytest.raises(InvalidFieldError) as caught:
        build(extra, **fields)
    return caught.value.field


@pytest.mark.parametrize(
    "extra",
    [
        b"",
        b"{}",
        b'{"n":1}',
        b'{"n":null,"temperature":null,"stop":null}',
        b'{"stop":"x"}',
        b'{"stop":["x","y"]}',
        b'{"temperature":1}',
        b'{"logprobs":true,"top_logprobs":5}',
        b'{"response_format":{"type":"json_schema","json_schema":{"name":"n"}}}',
        b'{"tool_choice":"none"}',
        b'{"tool_choice":{"type":"function","function":{"name":"f"}}}',
        b'{"tools":[{"type":"function","function":{"name":"f","parameters":{}}}]}',
        b'{"logit_bias":{"17":-100,"4":0.5}}',
        b'{"stream":false,"stream_options":{"include_usage":false}}',
        b'{"max_completion_tokens":5}',
        b'{"vllm_xargs":{"a":1,"b":[1,"x"],"c":2.5}}',
        b'{"chat_template_kwargs":{"enable_thinking":false}}',
        b'{"unknown_member":[1,{"deep":null}]}',
        b'{"nested":{"kv_transfer_params":{}}}',
    ],
)
def test_valid_members_pass(extra) -> None:
    chat(extra)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        (b'{"max_tokens":-1}', "max_tokens"),
        (b'{"max_tokens":0}', "max_tokens"),
        (b'{"max_tokens":"5"}', "max_tokens"),
        (b'{"max_tokens":5.5}', "max_tokens"),
        (b'{"max_tokens":true}', "max_tokens"),
        (b'{"max_completion_tokens":0}', "max_completion_tokens"),
        (b'{"temperature":"0.7"}', "temperature"),
        (b'{"temperature":-0.1}', "temperature"),
        (b'{"temperature":1e999}', "temperature"),
        (b'{"top_p":0}', "top_p"),
        (b'{"n":0}', "n"),
        (b'{"n":1.5}', "n"),
        (b'{"n":129}', "n"),
        (b'{"stop":5}', "stop"),
        (b'{"stop":["ok",""]}', "stop[1]"),
        (b'{"stop":["ok",7]}', "stop[1]"),
        (b'{"stop_token_ids":["7"]}', "stop_token_ids[0]"),
        (b'{"logprobs":1}', "logprobs"),
        (b'{"top_logprobs":"3"}', "top_logprobs"),
        (b'{"response_format":"json"}', "response_format"),
        (b'{"response_format":{}}', "response_format"),
        (b'{"response_format":{"type":1}}', "response_format.type"),
        (b'{"tools":{}}', "tools"),
        (b'{"tools":[]}', "tools"),
        (b'{"tools":[{"type":"function","function":"f"}]}', "tools[0].function"),
        (b'{"tool_choice":"any"}', "tool_choice"),
        (b'{"logit_bias":[]}', "logit_bias"),
        (b'{"logit_bias":{"1":101}}', "logit_bias[...]"),
        (b'{"stream":"yes"}', "stream"),
        (b'{"stream_options":true}', "stream_options"),
        (b'{"stream_options":{"include_usage":1}}', "stream_options.include_usage"),
        (b'{"seed":1e3}', "seed"),
        (b'{"seed":9223372036854775808}', "seed"),
        (b'{"echo":1}', "echo"),
        (b'{"user":7}', "user"),
        (b'{"cache_salt":""}', "cache_salt"),
        (b'{"chat_template_kwargs":[]}', "chat_template_kwargs"),
        (b'{"prompt_logprobs":true}', "prompt_logprobs"),
        (b'{"min_tokens":9,"max_completion_tokens":8}', "min_tokens"),
    ],
)
def test_wrong_type_or_bound_is_named(extra, field) -> None:
    assert fault(extra) == f"extra_body_json.{field}"


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        (b'{"logprobs":true}', "logprobs"),
        (b'{"best_of":0}', "best_of"),
        (b'{"suffix":1}', "suffix"),
    ],
)
def test_completions_have_their_own_types(extra, field) -> None:
    assert fault(extra, complete) == f"extra_body_json.{field}"


@pytest.mark.parametrize(
    "extra",
    [
        b"[]",
        b"null",
        b"3",
        b'"x"',
        b"{",
        b'{"a":}',
        b'{"a":1,}',
        b'{"a":NaN}',
        b'{"a":01}',
        b"{} {}",
        b"\xff",
        b'{"a":"\xff"}',
        b'{"a":{"b":"\xc3"}}',
        b"\xef\xbb\xbf{}",
        b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("build", [chat, complete])
def test_what_is_no_json_object_is_refused(extra, build) -> None:
    assert fault(extra, build) == "extra_body_json"


@pytest.mark.parametrize("build", [chat, complete])
@pytest.mark.parametrize(
    ("extra", "field"),
    [
        (b'{"kv_transfer_params":null}', "kv_transfer_params"),
        (b'{"kv_transfer_params":{"remote_host":"10.0.0.1"}}', "kv_transfer_params"),
        (b'{"kv\\u005ftransfer_params":{}}', "kv_transfer_params"),
        (b'{"x":1,"kv_transfer_params":1,"x":2}', "kv_transfer_params"),
        (b'{"ec_transfer_params":{}}', "ec_transfer_params"),
        (b'{"vllm_xargs":{"kv_transfer_params":"x"}}', "vllm_xargs.kv_transfer_params"),
        (b'{"request_id":"r"}', "request_id"),
        (b'{"conversation_id":"c"}', "conversation_id"),
    ],
)
def test_reserved_members_are_refused(build, extra, field) -> None:
    assert fault(extra, build) == f"extra_body_json.{field}"


def test_params_hidden_in_xargs_are_refused_whatever_their_type() -> None:
    assert fault(b'{"vllm_xargs":{"kv_transfer_params":{"a":1}}}').startswith(
        "extra_body_json.vllm_xargs"
    )


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        (b'{"model":"other"}', "model"),
        (b'{"messages":[]}', "messages"),
        (b'{"temperature":1}', "temperature"),
    ],
)
def test_member_that_a_typed_field_sets_too_is_refused(extra, field) -> None:
    sampling = router_pb2.SamplingParams(temperature=0.5)
    assert fault(extra, sampling=sampling) == f"extra_body_json.{field}"


def test_prompt_in_the_extra_body_of_a_completion_is_refused() -> None:
    assert fault(b'{"prompt":"other"}', complete) == "extra_body_json.prompt"


@pytest.mark.parametrize(
    ("extra", "feature"),
    [
        (b'{"n":2}', "n"),
        (b'{"best_of":2}', "best_of"),
        (b'{"use_beam_search":true}', "use_beam_search"),
        (b'{"prompt_logprobs":0}', "prompt_logprobs"),
        (b'{"echo":true}', "echo"),
        (b'{"n":1,"echo":false,"prompt_logprobs":null,"logprobs":3}', None),
    ],
)
def test_features_that_need_one_leg(extra, feature) -> None:
    turn = complete(extra, conversation_id="c")
    assert turn.options.single_leg_feature == feature
    assert turn.retains is (feature is None)


def test_limit_of_the_answer_and_where_it_was_set() -> None:
    both = chat(b'{"max_completion_tokens":7}', sampling=router_pb2.SamplingParams(max_tokens=9))
    assert both.options.max_new_tokens == 7
    assert both.max_new_tokens_path == "extra_body_json.max_completion_tokens"
    typed = chat(b"", sampling=router_pb2.SamplingParams(max_tokens=9))
    assert typed.max_new_tokens_path == "sampling.max_tokens"
    assert chat(b"").max_new_tokens_path == ""


_NUMBERS = st.one_of(
    st.integers(-(10**40), 10**40).map(str),
    st.decimals(allow_nan=False, allow_infinity=False, places=5).map(str),
    st.sampled_from(["1.0", "1.50", "-0", "-0.0", "1e5", "1E+05", "0.1e-7", "1e400"]),
)
_SPACE = st.sampled_from(["", " ", "\n", "\t "])
_STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(
    lambda text: json.dumps(text, ensure_ascii=len(text) % 2 == 0)
)


def _array(items: list[str]) -> str:
    return "[" + ",".join(items) + "]"


def _object(members: list[tuple[str, str, str]]) -> str:
    return "{" + ",".join(f"{space}{name}:{space}{value}" for name, value, space in members) + "}"


_JSON = st.recursive(
    st.one_of(_NUMBERS, _STRINGS, st.sampled_from(["true", "false", "null"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(_array),
        st.lists(st.tuples(_STRINGS, inner, _SPACE), max_size=4).map(_object),
    ),
    max_leaves=12,
)
_OPAQUE_OBJECT = st.lists(st.tuples(_STRINGS, _JSON, _SPACE), max_size=4).map(_object)

# A busy test machine is slow, not wrong.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_PATIENT
@given(value=_JSON, name=st.sampled_from(["vendor_a", "vendor_b", "x-y.z", "ü"]))
def test_unknown_members_reach_the_engine_byte_for_byte(value, name) -> None:
    extra = f"{{{json.dumps(name)}: {value} }}".encode()
    body = msgspec.json.decode(chat(extra).body_json, type=dict[str, msgspec.Raw])
    assert bytes(body[name]) == value.encode()


@_PATIENT
@given(schema=_OPAQUE_OBJECT, extra=_JSON)
def test_tool_schemas_parts_and_message_extras_survive_byte_for_byte(schema, extra) -> None:
    request = router_pb2.ChatRequest(
        model="m",
        messages=[
            router_pb2.ChatMessage(
                role="user",
                content_parts_json=f'[{{"type":"text","v":{extra}}}]'.encode(),
                extra_json=f'{{"vendor":{extra}}}'.encode(),
            )
        ],
        tools=[router_pb2.Tool(name="f", parameters_json=schema.encode())],
    )
    body = chat_turn(request).body_json
    assert f'"content":[{{"type":"text","v":{extra}}}]'.encode() in body
    assert f'"vendor":{extra}'.encode() in body
    assert f'"parameters":{schema}'.encode() in body
    json.loads(body, parse_float=Decimal, parse_int=Decimal)


def test_order_of_members_is_kept() -> None:
    body = chat(b'{"zeta":1,"alpha":2,"mid":3}').body_json
    assert body.endswith(b'"zeta":1,"alpha":2,"mid":3}')
