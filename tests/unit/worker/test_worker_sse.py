"""Events come out whole, wherever the byte stream was cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.sse import SseParser


def _parse(*pieces: bytes) -> list[bytes]:
    parser = SseParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.close()


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b'data: {"a":1}\n\ndata: [DONE]\n\n', [b'{"a":1}', b"[DONE]"]),
        (b'data: {"a":1}\r\n\r\ndata: [DONE]\r\n\r\n', [b'{"a":1}', b"[DONE]"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b": keep-alive\n\ndata: a\n\n", [b"a"]),
        (b"data: a\n: comment\ndata: b\n\n", [b"a\nb"]),
        (b"event: message\nid: 1\nretry: 5\ndata: a\n\n", [b"a"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\n\ndata: last", [b"a", b"last"]),
        (b"data: a\n\ndata: last\n", [b"a", b"last"]),
        (b"data\n\n", [b""]),
        (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: a\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\n\nevent: x\n\n", [b"a"]),
        (b"", []),
    ],
)
def test_the_event_stream_format(stream: bytes, events: list[bytes]) -> None:
    assert _parse(stream) == events
    assert _parse(*(stream[i : i + 1] for i in range(len(stream)))) == events


def test_an_event_is_given_out_with_the_byte_that_ends_it() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r\n\r") == [b"a"]
    assert parser.feed(b"\ndata: b\n") == []
    assert parser.feed(b"\n") == [b"b"]


def test_a_character_split_over_two_reads_stays_whole() -> None:
    text = "你好👍".encode()
    assert _parse(b"data: " + text[:4], text[4:10], text[10:] + b"\n\n") == [text]


_data_line = st.text(
    st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20
).map(str.encode)
_event = st.tuples(
    st.lists(_data_line, min_size=1, max_size=3),
    st.sampled_from([b"", b": comment", b"event: x"]),
)


@given(
    events=st.lists(_event, max_size=6),
    newline=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(0, 400), max_size=30),
)
def test_any_split_of_any_stream_gives_the_same_events(
    events: list[tuple[list[bytes], bytes]], newline: bytes, cuts: list[int]
) -> None:
    stream = b""
    for lines, other in events:
        stream += (other + newline) if other else b""
        stream += b"".join(b"data: " + line + newline for line in lines) + newline
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(edges)]
    assert _parse(*pieces) == [b"\n".join(lines) for lines, _ in events]
