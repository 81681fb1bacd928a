"""The block pool: no block is lost, none is given out twice, the oldest goes first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.sim.blocks import BlockPool, FreedReads, extend_hashes
from services.sim.kv import encode_tokens

_BLOCKS = 12
_SIZE = 4


def _pool(freed: FreedReads = FreedReads.NOISE) -> BlockPool:
    return BlockPool(_BLOCKS, _SIZE, freed)


def test_block_zero_is_never_given_out() -> None:
    blocks = _pool().allocate(_BLOCKS - 1)
    assert blocks is not None
    assert sorted(blocks) == list(range(1, _BLOCKS))


def test_too_many_blocks_are_refused_whole() -> None:
    pool = _pool()
    assert pool.allocate(_BLOCKS) is None
    assert pool.num_free == _BLOCKS - 1


def test_the_end_of_the_sequence_freed_first_is_given_away_first() -> None:
    pool = _pool()
    first = pool.allocate(5) or []
    second = pool.allocate(6) or []
    pool.release(first)
    pool.release(second)
    assert pool.allocate(7) == [*reversed(first), second[-1], second[-2]]


def test_a_shared_block_stays_until_its_last_user_goes() -> None:
    pool = _pool()
    (block,) = pool.allocate(1) or []
    pool.share([block])
    pool.release([block])
    assert pool.users(block) == 1
    pool.release([block])
    assert pool.users(block) == 0


def test_a_freed_block_is_found_in_the_cache_until_it_is_given_away() -> None:
    pool = _pool()
    blocks = pool.allocate(2) or []
    hashes: list[bytes] = []
    extend_hashes(hashes, list(range(8)), _SIZE, None)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.cache(block, block_hash)
    pool.release(blocks)
    assert pool.find_cached(hashes) == blocks
    pool.allocate(10)  # all fresh ones and the end of the freed
    assert pool.find_cached(hashes) == blocks[:1]


def test_a_hash_covers_everything_before_and_the_salt() -> None:
    def hashes(tokens: list[int], salt: str | None = None) -> list[bytes]:
        made: list[bytes] = []
        extend_hashes(made, tokens, _SIZE, salt)
        return made

    plain = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(plain) == 2
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8])[1] == plain[1]
    assert hashes([0, 2, 3, 4, 5, 6, 7, 8])[1] != plain[1]
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8], "salt")[1] != plain[1]


def test_reading_a_block_in_use_gives_its_content_whosever_it_is() -> None:
    pool = _pool()
    (block,) = pool.allocate(1) or []
    pool.memory[block] = ((b"seed", encode_tokens([1])),)
    assert pool.read([block]) == [((b"seed", encode_tokens([1])),)]


@pytest.mark.parametrize("freed", list(FreedReads))
def test_reading_a_freed_block_gives_noise_or_what_it_held(freed: FreedReads) -> None:
    pool = _pool(freed)
    (block,) = pool.allocate(1) or []
    pool.memory[block] = held = ((b"seed", encode_tokens([1])),)
    pool.release([block])
    (content,) = pool.read([block])
    assert (content == held) is (freed is FreedReads.STALE)
    if freed is FreedReads.NOISE:
        assert pool.read([block]) != [content]


def test_reading_a_block_that_does_not_exist_fails() -> None:
    with pytest.raises(IndexError):
        _pool().read([_BLOCKS])


def test_the_cache_is_reset_only_while_no_block_is_in_use() -> None:
    pool = _pool()
    blocks = pool.allocate(1) or []
    pool.cache(blocks[0], b"hash")
    assert not pool.reset_cache()
    pool.release(blocks)
    assert pool.reset_cache()
    assert pool.find_cached([b"hash"]) == []


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share prefixes, and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = _pool()
        self.held: list[list[int]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=_SIZE, max_size=5 * _SIZE))
    def begin(self, tokens: list[int]) -> None:
        hashes: list[bytes] = []
        extend_hashes(hashes, tokens, _SIZE, None)
        cached = self.pool.find_cached(hashes)
        fresh = -(-len(tokens) // _SIZE) - len(cached)
        unused = sum(1 for block in cached if not self.pool.users(block))
        if fresh + unused > self.pool.num_free:
            return
        self.pool.share(cached)
        added = self.pool.allocate(fresh)
        assert added is not None
        assert all(self.pool.users(block) == 1 for block in added)
        blocks = [*cached, *added]
        for block, block_hash in zip(blocks, hashes, strict=False):
            self.pool.cache(block, block_hash)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index))

    @invariant()
    def every_block_is_free_or_held_by_exactly_its_users(self) -> None:
        users = [block for blocks in self.held for block in blocks]
        assert all(self.pool.users(block) == users.count(block) for block in range(_BLOCKS))
        assert self.pool.num_free == _BLOCKS - 1 - len(set(users))
        assert self.pool.num_used == len(set(users))


PoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
