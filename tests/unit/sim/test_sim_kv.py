"""What KV blocks hold: right blocks read right, any other block shows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.sim.kv import Content, KvReader, read_slots, start_digest

_BLOCK = 4
_TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30)


def _written(tokens: list[int], cuts: list[int] | None = None) -> tuple[dict[int, Content], bytes]:
    """Blocks and digest after computing tokens, in pieces that end at the cuts."""
    memory: dict[int, Content] = {}
    reader = KvReader(memory, _BLOCK, start_digest("m"))
    blocks = list(range(10))
    start = 0
    for end in [*sorted(cuts or []), len(tokens)]:
        reader.write(blocks, tokens[start:end])
        start = end
    return memory, reader.digest(blocks)


def _read(memory: dict[int, Content], slots: int, blocks: list[int] | None = None) -> bytes:
    reader = KvReader(memory, _BLOCK, start_digest("m"))
    blocks = list(range(10)) if blocks is None else blocks
    reader.load(blocks, slots)
    return reader.digest(blocks)


@given(_TOKENS, st.data())
def test_how_tokens_were_cut_into_steps_does_not_matter(tokens: list[int], data) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=6))
    assert _written(tokens, cuts) == _written(tokens)


@given(_TOKENS)
def test_loaded_blocks_read_like_computed_ones(tokens: list[int]) -> None:
    memory, digest = _written(tokens)
    assert _read(memory, len(tokens)) == digest


@given(_TOKENS, st.data())
def test_a_prefix_of_the_slots_reads_like_a_shorter_sequence(tokens: list[int], data) -> None:
    length = data.draw(st.integers(1, len(tokens)))
    memory, _ = _written(tokens)
    assert _read(memory, length) == _written(tokens[:length])[1]


@given(_TOKENS)
def test_computing_the_last_token_again_changes_nothing(tokens: list[int]) -> None:
    memory, digest = _written(tokens)
    reader = KvReader(memory, _BLOCK, start_digest("m"))
    blocks = list(range(10))
    reader.load(blocks, len(tokens) - 1)
    reader.write(blocks, tokens[-1:])
    assert reader.digest(blocks) == digest
    assert memory == _written(tokens)[0]


@given(st.lists(st.integers(0, 9), min_size=9, max_size=30), st.data())
def test_a_foreign_block_anywhere_changes_all_that_follows(tokens: list[int], data) -> None:
    memory, digest = _written(tokens)
    foreign, _ = _written([*tokens[:-1], tokens[-1] + 1, 77, 77, 77, 77, 77, 77, 77, 77])
    place = data.draw(st.integers(0, (len(tokens) - 1) // _BLOCK))
    other = data.draw(st.sampled_from(sorted(foreign)))
    changed = memory | {place: foreign[other]}
    # A block that holds the same slots is not foreign.
    needed = min(_BLOCK, len(tokens) - place * _BLOCK)
    same = read_slots(b"", memory[place], needed) == read_slots(b"", changed[place], needed)
    assert (_read(changed, len(tokens)) == digest) is same


@given(st.permutations(range(4)))
def test_blocks_in_another_order_read_differently(order: list[int]) -> None:
    memory, digest = _written(list(range(16)))
    assert (_read(memory, 16, list(order)) == digest) is (list(order) == [0, 1, 2, 3])


def test_a_block_that_was_never_written_is_noticed() -> None:
    memory, digest = _written(list(range(12)))
    del memory[1]
    assert _read(memory, 12) != digest


def test_writing_into_a_pulled_block_keeps_what_was_pulled() -> None:
    memory, _ = _written(list(range(6)))
    foreign, _ = _written([99, *range(1, 6)])
    mixed = {0: memory[0], 1: foreign[1]}
    reader = KvReader(mixed, _BLOCK, start_digest("m"))
    blocks = list(range(10))
    reader.load(blocks, 6)
    reader.write(blocks, [6])
    assert reader.digest(blocks) != _written(list(range(7)))[1]
    assert len(mixed[1]) == 2


def test_models_of_different_names_share_nothing() -> None:
    assert start_digest("a") != start_digest("b")
