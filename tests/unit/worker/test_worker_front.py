"""Bodies are parsed as they arrive, and requests are what they would be anyway."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
import starlette.requests
from hypothesis import given, settings
from msgspec.json import decode
from starlette.requests import ClientDisconnect

from services.worker import engine_plugin
from services.worker.engine_events import EVENTS_SOCKET
from services.worker.engine_front import HEAD_HEADER, Front, parse_ahead, register
from tests.unit.worker.json_texts import Body, bodies, proper_bodies

_HEAD = b'{"model":"m","prompt":[1,2,3]'
_REST = b',"kv_transfer_params":{"blocks":[4]}}'
_WHOLE = _HEAD + _REST
_USED = "kvloop: bodies of requests are parsed as they arrive"


class _Decode:
    """Decodes, and remembers what; the first is an event."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.first = asyncio.Event()

    def __call__(self, text: bytes) -> Any:
        self.texts.append(text)
        self.first.set()
        return decode(text)


@pytest.fixture
def decoded() -> _Decode:
    return _Decode()


@pytest.fixture
def request_class(decoded: _Decode) -> type[starlette.requests.Request]:
    """A class of its own for each test, whose bodies are parsed ahead."""
    made = _unchanged_class()
    parse_ahead(made, decoded)
    return made


def _unchanged_class() -> type[starlette.requests.Request]:
    return type("Request", (starlette.requests.Request,), {})


class _Wire:
    """What arrives of a body: ASGI's messages.

    Args:
        pieces: the messages; None for a client that leaves.
    """

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for number, piece in enumerate(pieces, 1):
            self.send(piece, more=number < len(pieces))

    def send(self, piece: bytes | None, *, more: bool) -> None:
        if piece is None:
            self._messages.put_nowait({"type": "http.disconnect"})
        else:
            message = {"type": "http.request", "body": piece, "more_body": more}
            self._messages.put_nowait(message)

    async def receive(self) -> Any:
        return await self._messages.get()


def _request(
    of: type[starlette.requests.Request],
    pieces: Sequence[bytes | None],
    length: object = len(_HEAD),
) -> starlette.requests.Request:
    headers = (
        [] if length is None else [(HEAD_HEADER.lower().encode(), str(length).encode("latin-1"))]
    )
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    return of(scope, _Wire(pieces).receive)


async def _read(request: starlette.requests.Request) -> Any:
    """As FastAPI reads a body: its bytes, then its value. Errors are told as text."""
    try:
        return await request.body(), repr(await request.json())
    except Exception as error:
        return type(error), str(error)


async def test_the_head_is_parsed_while_the_rest_is_to_come(decoded: _Decode) -> None:
    made = _unchanged_class()
    parse_ahead(made, decoded)
    wire = _Wire([])
    headers = [(HEAD_HEADER.lower().encode(), str(len(_HEAD)).encode())]
    request = made({"type": "http", "headers": headers}, wire.receive)
    reading = asyncio.ensure_future(_read(request))
    wire.send(_HEAD[:5], more=True)
    wire.send(_HEAD[5:], more=True)
    async with asyncio.timeout(10):
        await decoded.first.wait()
    assert decoded.texts == [_HEAD + b"}"]
    assert not reading.done()
    wire.send(_REST, more=False)
    assert await reading == (_WHOLE, repr(json.loads(_WHOLE)))
    assert decoded.texts == [_HEAD + b"}", b"{" + _REST[1:]]


async def test_a_body_that_comes_whole_is_parsed_once(
    request_class: type[starlette.requests.Request], decoded: _Decode
) -> None:
    request = _request(request_class, [_WHOLE], len(_WHOLE) - 1)
    assert await request.body() == _WHOLE
    value = await request.json()
    assert value == json.loads(_WHOLE)
    assert await request.json() is value
    assert decoded.texts == [_WHOLE]


async def test_the_value_can_be_asked_for_at_once(
    request_class: type[starlette.requests.Request], decoded: _Decode
) -> None:
    """And again, as the bytes can."""
    request = _request(request_class, [_HEAD, _REST])
    value = await request.json()
    assert value == json.loads(_WHOLE)
    assert await request.body() == _WHOLE
    assert [chunk async for chunk in request.stream()] == [_WHOLE, b""]
    assert await request.json() is value
    assert len(decoded.texts) == 2


@pytest.mark.parametrize("length", [len(_HEAD), len(_WHOLE), 999_999_999_999])
def test_what_was_read_of_a_body_goes_when_its_value_is_there(length: int) -> None:
    """The request has it, and lives as long as the answer takes; so does its value."""
    front = Front(length, decode)
    for piece in (_HEAD[:5], _HEAD[5:], _REST):
        front.add(piece)
    before = front.value(_WHOLE)
    kept = [kept for kept in vars(front).values() if isinstance(kept, bytes | list | dict)]
    assert [each for each in kept if each] == ([before] if before else [])
    assert front.value(_WHOLE) is before


async def test_the_later_of_two_equal_names_wins_and_keeps_the_firsts_place(
    request_class: type[starlette.requests.Request],
) -> None:
    pieces = [b'{"a":1,"b":2,"a":3', b',"b":4,"c":5,"a":6}']
    value = await _request(request_class, pieces, len(pieces[0])).json()
    assert list(value.items()) == [("a", 6), ("b", 4), ("c", 5)]


@pytest.mark.parametrize(
    "length",
    [
        *("", "x", "-1", "+5", "1_0", "1.0", "²", "9" * 5000),
        *(0, 1, 3, len(_HEAD) - 1, len(_HEAD) + 1, len(_WHOLE), len(_WHOLE) + 1),
    ],
)
async def test_a_length_that_is_no_heads_leaves_the_body_to_json_loads(
    request_class: type[starlette.requests.Request],
    length: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvloop")
    read = await _read(_request(request_class, [_HEAD, _REST], length))
    assert read == (_WHOLE, repr(json.loads(_WHOLE)))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (b"{", b',"a":1}'),
        (b'{"a":1', b",}"),
        (b'{"a":1', b'"b":2}'),
        (b'{"a":1', b' "b":2}'),
        (b'{"a":1,', b',"b":2}'),
        (b'{"a":1', b',"b":2'),
        (b'{"a":1', b',"b":2}}'),
        (b'{"a":1', b""),
        (b'{"a":1', b"}x"),
        (b'[{"a":1', b"}]"),
        ('{"a":"é'.encode()[:-1], 'é"}'.encode()[1:]),
        (b'{"a":NaN', b"}"),
        (b'{"a":1e999', b',"b":2}'),
        (b'{"a":1', b',"b":"\\ud800"}'),
        (b'{"a":"\xed\xa0\x80"', b"}"),
        (b'\xef\xbb\xbf{"a":1', b"}"),
        (b'{"a":1', b',"b":"\xff"}'),
        (b'{"a":"\n"', b"}"),
        (b'{"a":' + b"1" * 5000, b"}"),
    ],
)
async def test_what_is_no_json_or_no_split_is_left_to_json_loads(
    request_class: type[starlette.requests.Request], head: bytes, rest: bytes
) -> None:
    expected = await _read(_request(_unchanged_class(), [head + rest], None))
    assert await _read(_request(request_class, [head, rest], len(head))) == expected


@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("depth", [10, 300, 399, 400, 900, 950, 990, 998, 1000, 1100])
def test_a_text_that_nests_as_deep_as_pythons_stack_is_left_to_json_loads(
    opened: str, closed: str, depth: int
) -> None:
    """`msgspec` gives up some levels later, and not at the same in each version of Python."""
    head = ('{"deep":' + opened * depth + "1" + closed * depth).encode()
    front = Front(len(head), decode)
    front.add(head)
    assert front.value(head + b"}") == (json.loads(head + b"}") if depth < 400 else None)


async def test_many_braces_are_no_depth(
    request_class: type[starlette.requests.Request], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvloop")
    whole = json.dumps({"messages": [{"content": "{[" * 500}] * 500}).encode()
    assert await _request(request_class, [whole], len(whole) - 1).json() == json.loads(whole)
    assert caplog.messages == [_USED]


def _value(body: Body) -> Any:
    front = Front(body.length, decode)
    for piece in body.pieces:
        front.add(piece)
    return front.value(body.text)


@given(bodies())
@settings(max_examples=500)
def test_a_value_is_json_loads_or_none(body: Body) -> None:
    """Of equal types down to the last item: texts tell 1 from 1.0 and True, and 0.0 from -0.0."""
    value = _value(body)
    if value is not None:
        assert repr(value) == repr(json.loads(body.text))


@given(proper_bodies())
@settings(max_examples=300)
def test_proper_json_that_is_split_well_has_a_value(body: Body) -> None:
    assert repr(_value(body)) == repr(json.loads(body.text))


@given(bodies())
@settings(max_examples=100)
async def test_a_request_reads_as_it_does_anyway(body: Body) -> None:
    made = _unchanged_class()
    parse_ahead(made, decode)
    expected = await _read(_request(_unchanged_class(), [*body.pieces, b""], None))
    assert await _read(_request(made, [*body.pieces, b""], body.length)) == expected


async def test_a_client_that_leaves_is_told_of_as_ever(
    request_class: type[starlette.requests.Request],
) -> None:
    for pieces in ([_HEAD[:5], None], [_HEAD, None]):
        with pytest.raises(ClientDisconnect):
            await _request(request_class, pieces).body()
        with pytest.raises(ClientDisconnect):
            await _request(request_class, pieces).json()


async def test_requests_without_the_header_are_left_alone(
    request_class: type[starlette.requests.Request], decoded: _Decode
) -> None:
    request = _request(request_class, [_HEAD, _REST], None)
    attributes = set(vars(_request(_unchanged_class(), [], None)))
    assert await request.json() == json.loads(_WHOLE)
    assert not decoded.texts
    assert set(vars(request)) - attributes == {"_headers", "_body", "_json"}


async def test_what_middleware_passes_bodies_on_with_is_left_alone(
    request_class: type[starlette.requests.Request], decoded: _Decode
) -> None:
    passing = type("Passing", (request_class,), {})
    assert await _read(_request(passing, [_HEAD, _REST])) == (_WHOLE, repr(json.loads(_WHOLE)))
    assert not decoded.texts


async def test_a_body_of_which_not_all_was_seen_is_left_to_json_loads(
    request_class: type[starlette.requests.Request],
) -> None:
    """Someone read the head and threw it away."""
    other = b'{"all":"' + b"x" * (len(_HEAD) - 9) + b'"'
    assert len(other) == len(_HEAD)
    request = _request(request_class, [_HEAD, other + _REST])
    chunks = request.stream()
    assert isinstance(chunks, AsyncGenerator)
    assert await anext(chunks) == _HEAD
    await chunks.aclose()
    assert await request.json() == json.loads(other + _REST)


async def test_its_first_use_is_said_once(
    request_class: type[starlette.requests.Request], caplog: pytest.LogCaptureFixture
) -> None:
    """And not before: plugins are loaded before vLLM sets up its logs."""
    caplog.set_level(logging.INFO, "vllm.kvloop")
    for _ in range(2):
        await _request(request_class, [_HEAD, _REST]).json()
    assert caplog.messages == [_USED]


def test_a_plugin_that_is_loaded_twice_changes_nothing_more(
    request_class: type[starlette.requests.Request],
) -> None:
    once = request_class.stream, request_class.json
    parse_ahead(request_class, decode)
    assert (request_class.stream, request_class.json) == once


async def test_a_server_that_reads_bodies_in_another_way_is_left_alone_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(self: Any) -> bytes:
        if not hasattr(self, "_body"):
            self._body = (await self.receive())["body"]
        return bytes(self._body)

    made = type("Request", (starlette.requests.Request,), {"body": body})
    parse_ahead(made, decode)
    for _ in range(2):
        assert await _request(made, [_WHOLE]).json() == json.loads(_WHOLE)
    (said,) = caplog.messages
    assert "in another way" in said


@pytest.mark.parametrize("name", ["stream", "json"])
def test_a_request_of_another_kind_is_left_alone_and_it_is_said(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = type("Request", (), {"stream": len, "json": len, name: None})
    before = dict(vars(made))
    parse_ahead(made, decode)
    assert dict(vars(made)) == before
    assert "in another way" in caplog.text


@pytest.fixture
def starlettes_request(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """The class that starlette has, one of its own for each test."""
    monkeypatch.setattr(starlette.requests, "Request", _unchanged_class())
    return lambda: starlette.requests.Request


async def test_beside_a_sidecar_requests_are_changed(
    monkeypatch: pytest.MonkeyPatch,
    starlettes_request: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvloop")
    monkeypatch.setenv(EVENTS_SOCKET, "/run/decode.sock")
    register()
    assert await _request(starlettes_request(), [_HEAD, _REST]).json() == json.loads(_WHOLE)
    assert caplog.messages == [_USED]


@pytest.mark.parametrize("socket", [None, ""])
def test_without_a_sidecar_requests_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch, starlettes_request: Callable[[], Any], socket: str | None
) -> None:
    monkeypatch.delenv(EVENTS_SOCKET, raising=False)
    if socket is not None:
        monkeypatch.setenv(EVENTS_SOCKET, socket)
    before = dict(vars(starlettes_request()))
    engine_plugin.register()
    assert dict(vars(starlettes_request())) == before


def test_an_engine_without_starlette_starts_all_the_same_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(EVENTS_SOCKET, "/run/decode.sock")
    monkeypatch.delattr(starlette.requests, "Request")
    register()
    assert "in another way" in caplog.text
