"""The proof never claims more than two sequences share."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.proof import DIGEST_BYTES, ExtraKeys, Proof, make_proof, proven_tokens

BLOCK = 4
STEP = 32
"""Blocks of 4 tokens share a digest by eight."""


def _common(left: list[int], right: list[int]) -> int:
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def _marked(**marks: str) -> ExtraKeys:
    """Extra keys at single tokens: `at_8="x"` says "x" of token 8."""
    places = {int(name.removeprefix("at_")): mark for name, mark in marks.items()}

    def keys(start: int, end: int) -> object:
        return tuple(mark for place, mark in sorted(places.items()) if start <= place < end)

    return ExtraKeys(keys, [(place, place + 1) for place in places])


@st.composite
def sequences(draw) -> list[int]:
    """Long runs of few distinct tokens, with changes: equal prefixes are frequent."""
    tokens = [0] * draw(st.integers(1, 200))
    for place in draw(st.lists(st.integers(0, 199), max_size=2)):
        if place < len(tokens):
            tokens[place] = 1
    return tokens


@given(held=sequences(), prompt=sequences())
def test_proven_is_the_common_prefix_in_steps_or_the_whole_sequence(held, prompt) -> None:
    shared = _common(held, prompt)
    expected = len(held) if shared == len(held) else shared // STEP * STEP
    assert proven_tokens(make_proof(held, BLOCK), prompt) == expected


@given(held=sequences(), prompt=sequences())
def test_blocks_longer_than_a_step_are_proven_as_wholes(held, prompt) -> None:
    shared = _common(held, prompt)
    expected = len(held) if shared == len(held) else shared // 48 * 48
    assert proven_tokens(make_proof(held, 48), prompt) == expected


@given(
    held=sequences(),
    place=st.integers(0, 199),
    mark=st.sampled_from(["image", None]),
    other=st.sampled_from(["image", "another", None]),
)
def test_extra_keys_count_from_where_they_stand(held, place, mark, other) -> None:
    def keys(said: str | None) -> ExtraKeys | None:
        return _marked(**{f"at_{place}": said}) if said else None

    proven = proven_tokens(make_proof(held, BLOCK, keys(mark)), [*held, 5], keys(other))
    same = mark == other or place >= len(held)
    assert proven == (len(held) if same else place // STEP * STEP)


def test_each_of_several_extra_keys_counts() -> None:
    tokens = list(range(200))
    held = make_proof(tokens, BLOCK, _marked(at_0="salt", at_70="a", at_71="b", at_199="c"))
    assert (
        proven_tokens(held, tokens, _marked(at_0="salt", at_70="a", at_71="b", at_199="c")) == 200
    )
    assert proven_tokens(held, tokens, _marked(at_0="salt", at_70="a", at_71="b")) == 192
    assert proven_tokens(held, tokens, _marked(at_0="salt", at_70="a", at_71="x")) == 64
    assert proven_tokens(held, tokens, _marked(at_70="a", at_71="b", at_199="c")) == 0


def test_what_shapes_kv_beyond_the_prompt_of_the_sequence_does_not_count() -> None:
    held = make_proof([7] * 100, BLOCK)
    assert proven_tokens(held, [7] * 160, _marked(at_120="image")) == 100


def test_incomplete_last_step_is_proven_only_as_a_whole() -> None:
    held = make_proof(list(range(70)), BLOCK)
    assert proven_tokens(held, list(range(70))) == 70
    assert proven_tokens(held, [*range(70), 99]) == 70
    assert proven_tokens(held, list(range(69))) == 64
    assert proven_tokens(held, [*range(69), 99, 100]) == 64


@given(held=sequences())
def test_proof_survives_json(held) -> None:
    proof = make_proof(held, BLOCK)
    assert Proof.from_params(json.loads(json.dumps(proof.to_params()))) == proof


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 1},
        {"version": None},
        {"block_size": 0},
        {"block_size": "4"},
        {"block_size": True},
        {"block_size": 5},
        {"step": 0},
        {"step": 36},
        {"step": 16},
        {"num_tokens": -1},
        {"num_tokens": 96},
        {"digests": "not base64!"},
        {"digests": None},
        {"digests": ""},
        {"digests": "A" * 60},
        {"digests": "!" * 64},
        {"digests": "é" * 64},
        {"digests": b"A" * 64},
    ],
)
def test_damaged_proof_is_no_proof(damage) -> None:
    params = make_proof(list(range(70)), BLOCK).to_params()
    assert Proof.from_params(params) is not None
    assert Proof.from_params({**params, **damage}) is None


@pytest.mark.parametrize("place", range(3 * DIGEST_BYTES))
def test_a_changed_digest_proves_less(place) -> None:
    held = list(range(70))
    proof = make_proof(held, BLOCK)
    damaged = bytearray(proof.digests)
    damaged[place] ^= 1
    changed = Proof(proof.block_size, proof.step, proof.num_tokens, bytes(damaged))
    whole = place < 2 * DIGEST_BYTES  # the last digest alone says that all is equal
    assert proven_tokens(changed, held) == (70 if whole else 64)


@pytest.mark.parametrize("value", [None, [], "proof", 1, {}])
def test_anything_else_is_no_proof(value) -> None:
    assert Proof.from_params(value) is None


@pytest.mark.parametrize("key", ["block_size", "step", "num_tokens", "digests", "version"])
def test_proof_without_one_member_is_no_proof(key) -> None:
    params = make_proof(list(range(10)), BLOCK).to_params()
    del params[key]
    assert Proof.from_params(params) is None
