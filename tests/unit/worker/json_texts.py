"""Texts of JSON objects, as any client may write them, and how they can be cut in two."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

Texts = st.SearchStrategy[str]

_blank = st.text(" \t\r\n", max_size=2)
_edges = [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**25]
_numbers = st.one_of(
    st.one_of(st.integers(), st.sampled_from(_edges)).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?", fullmatch=True),
    st.sampled_from(["-0", "-0.0", "1e-400", "5e-324", "2.5e-324", "1E5", "1e+5"]),
)
_odd_numbers = st.sampled_from(
    ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "01", "1.", ".5", "+1", "1e", "1" * 5000]
)
_pieces = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(
        lambda text: json.dumps(text)[1:-1]
    ),
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\'), max_size=8),
    st.sampled_from([r"\ud83d\ude00", r"\/", r"\u0000", r"\u00E9", "\x7f"]),
)
_odd_pieces = st.sampled_from([r"\ud800", r"\udc00x", r"\ud83d\u0041", r"\x", r"\u12", "\t", "\0"])


def _strings(pieces: Texts) -> Texts:
    return st.lists(pieces, max_size=3).map(lambda drawn: '"' + "".join(drawn) + '"')


def _members(values: Texts) -> Texts:
    # Few names, so that some stand twice.
    names = st.sampled_from(['"a"', '"b"', r'"\u0061"', '"é"'])
    return st.tuples(names, _blank, values).map(lambda drawn: f"{drawn[0]}{drawn[1]}:{drawn[2]}")


def _join(items: Sequence[str], opened: str, closed: str, blank: str) -> str:
    return opened + blank + (blank + "," + blank).join(items) + blank + closed


def _values(scalars: Texts) -> Texts:
    def containers(inner: Texts) -> Texts:
        arrays = st.builds(_join, st.lists(inner, max_size=3), st.just("["), st.just("]"), _blank)
        objects = st.builds(
            _join, st.lists(_members(inner), max_size=3), st.just("{"), st.just("}"), _blank
        )
        return arrays | objects

    return st.recursive(scalars, containers, max_leaves=4)


_scalars = st.one_of(st.sampled_from(["null", "true", "false"]), _numbers, _strings(_pieces))
_proper = _members(_values(_scalars))
_odd = _members(_values(_scalars | _odd_numbers | st.just("nul") | _strings(_pieces | _odd_pieces)))


@dataclass(frozen=True)
class Body:
    """A request's body, and where its sender says that the head ends.

    Attributes:
        text: the whole; JSON or nearly so.
        length: of the head, right or wrong.
        pieces: the body as it arrives.
    """

    text: bytes
    length: int
    pieces: Sequence[bytes]


@st.composite
def proper_bodies(draw: st.DrawFn) -> Body:
    """JSON of every kind, cut behind a member."""
    return _cut(draw, *draw(st.sampled_from([(0, 0), (1, 0), (1, 1), (3, 2)])), _proper)


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """JSON, nearly JSON, cut well or anywhere."""
    made = _cut(
        draw,
        draw(st.integers(0, 2)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from([_proper, _odd])),
    )
    text, length = made.text, made.length
    at = draw(st.integers(0, len(text)))
    match draw(st.integers(0, 7)):
        case 0:
            length = draw(st.integers(0, len(text) + 2))
        case 1:
            text = text[:at] + draw(st.binary(max_size=2)) + text[at + draw(st.integers(0, 2)) :]
        case 2:
            encodings = ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"]
            text = text.decode().encode(draw(st.sampled_from(encodings)))
    return Body(text, length, _pieces_of(draw, text))


def _cut(draw: st.DrawFn, before: int, after: int, members: Texts) -> Body:
    blank = draw(_blank)
    first, last = ([draw(members) for _ in range(count)] for count in (before, after))
    head = (draw(_blank) + _join(first, "{", "", blank)).encode()
    rest = ("".join("," + blank + member for member in last) + blank + "}" + draw(_blank)).encode()
    return Body(head + rest, len(head), _pieces_of(draw, head + rest))


def _pieces_of(draw: st.DrawFn, text: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    pieces = [text[left:right] for left, right in itertools.pairwise([0, *cuts, len(text)])]
    return [piece for piece in pieces if piece]
