"""The proof never claims more than two sequences share."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.proof import DIGEST_BYTES, Proof, make_proof, proven_tokens

BLOCK = 4


def _common(left: list[int], right: list[int]) -> int:
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared += 1
    return shared


# Few distinct tokens, so that equal prefixes and near misses are frequent.
sequences = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@given(held=sequences, prompt=sequences)
def test_proven_is_the_common_prefix_in_blocks_or_the_whole_sequence(held, prompt) -> None:
    shared = _common(held, prompt)
    expected = len(held) if shared == len(held) else shared // BLOCK * BLOCK
    assert proven_tokens(make_proof(held, BLOCK), prompt) == expected


@given(held=sequences, prompt=sequences, key=st.sampled_from(["salt-a", "salt-b", None]))
def test_other_extra_keys_prove_nothing(held, prompt, key) -> None:
    def keys(start: int, end: int) -> object:
        return (key,) if start == 0 and key else None

    proven = proven_tokens(make_proof(held, BLOCK, keys), prompt, lambda start, end: ("salt-c",))
    assert proven == 0


def test_extra_keys_in_the_middle_end_the_proof_there() -> None:
    tokens = list(range(20))
    held = make_proof(tokens, BLOCK, lambda start, end: ("image-1",) if start == 8 else None)
    other = proven_tokens(held, tokens, lambda start, end: ("image-2",) if start == 8 else None)
    assert other == 8
    same = proven_tokens(held, tokens, lambda start, end: ("image-1",) if start == 8 else None)
    assert same == 20


def test_incomplete_last_block_is_proven_only_as_a_whole() -> None:
    held = make_proof(list(range(10)), BLOCK)
    assert proven_tokens(held, list(range(10))) == 10
    assert proven_tokens(held, [*range(10), 99]) == 10
    assert proven_tokens(held, list(range(9))) == 8
    assert proven_tokens(held, [*range(9), 99, 100]) == 8


@given(held=sequences)
def test_proof_survives_json(held) -> None:
    proof = make_proof(held, BLOCK)
    assert Proof.from_params(json.loads(json.dumps(proof.to_params()))) == proof


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"version": None},
        {"block_size": 0},
        {"block_size": "4"},
        {"block_size": True},
        {"num_tokens": -1},
        {"num_tokens": 12},
        {"digests": "not base64!"},
        {"digests": None},
        {"digests": ""},
        {"last": "00"},
        {"last": "zz" * DIGEST_BYTES},
        {"last": 7},
    ],
)
def test_damaged_proof_is_no_proof(damage) -> None:
    params = make_proof(list(range(10)), BLOCK).to_params()
    assert Proof.from_params(params) is not None
    assert Proof.from_params({**params, **damage}) is None


@pytest.mark.parametrize("value", [None, [], "proof", 1, {}])
def test_anything_else_is_no_proof(value) -> None:
    assert Proof.from_params(value) is None


@pytest.mark.parametrize("key", ["block_size", "num_tokens", "digests", "last", "version"])
def test_proof_without_one_member_is_no_proof(key) -> None:
    params = make_proof(list(range(10)), BLOCK).to_params()
    del params[key]
    assert Proof.from_params(params) is None
