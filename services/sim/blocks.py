"""The KV blocks of one engine: who uses them, which are cached, what they hold.

Follows vLLM's block pool. Blocks are counted by their users; a block without
users keeps its content and its place in the prefix cache until it is given to
someone else, and the one that was freed longest ago goes first. Block 0 is never
given out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from hashlib import blake2b

from services.sim.kv import DIGEST_BYTES, EMPTY, Content, encode_tokens


class FreedReads(StrEnum):
    """What another engine gets that reads a block without users."""

    NOISE = "noise"
    """Garbage, as from a debugging allocator: misuse always shows."""
    STALE = "stale"
    """What the block held last, as from a real GPU: misuse shows once the block
    has been given to another sequence."""


class BlockPool:
    """Blocks by number.

    Args:
        num_blocks: how many there are, block 0 included.
        block_size: tokens per block.
        freed_reads: what reads of unused blocks give.
    """

    def __init__(self, num_blocks: int, block_size: int, freed_reads: FreedReads) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.memory: dict[int, Content] = {}
        """Content by block; blocks that were never written are missing."""
        self._freed_reads = freed_reads
        self._users: dict[int, int] = {}
        self._fresh = 1  # blocks from here on have never been given out
        self._freed: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._noises = 0

    @property
    def num_free(self) -> int:
        """Blocks without users."""
        return self.num_blocks - self._fresh + len(self._freed)

    @property
    def num_used(self) -> int:
        """Blocks with users."""
        return len(self._users)

    @property
    def usage(self) -> float:
        """Share of blocks with users, 0 to 1."""
        return len(self._users) / (self.num_blocks - 1)

    def users(self, block: int) -> int:
        """How many sequences and pins use a block."""
        return self._users.get(block, 0)

    def is_cached(self, block: int) -> bool:
        """True if the prefix cache can find the block."""
        return block in self._hash_of

    def known_blocks(self) -> Iterable[int]:
        """Blocks that have been given out at least once."""
        return range(1, self._fresh)

    def allocate(self, count: int) -> list[int] | None:
        """Blocks for new tokens, or None if there are not enough."""
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            if self._fresh < self.num_blocks:
                block = self._fresh
                self._fresh += 1
            else:
                block, _ = self._freed.popitem(last=False)
                self._forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to blocks found in the prefix cache."""
        for block in blocks:
            self._freed.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take a user away. The end of a sequence is given away before its start."""
        for block in reversed(blocks):
            left = self._users[block] - 1
            if left:
                self._users[block] = left
            else:
                del self._users[block]
                self._freed[block] = None

    def find_cached(self, hashes: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def cache(self, block: int, block_hash: bytes) -> None:
        """Let the prefix cache find a complete block. The first of equals stays."""
        if block not in self._hash_of and block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def reset_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing done, while any block has users."""
        if self._users:
            return False
        self._block_of.clear()
        self._hash_of.clear()
        return True

    def read(self, blocks: Sequence[int]) -> list[Content]:
        """What another engine gets when it reads these blocks now.

        Whose blocks they are makes no difference: reads are positional.

        Raises:
            IndexError: there is no such block.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"block {block} of {self.num_blocks}")
        return [self._read(block) for block in blocks]

    def _read(self, block: int) -> Content:
        if block in self._users or self._freed_reads is FreedReads.STALE:
            return self.memory.get(block, EMPTY)
        self._noises += 1
        noise = blake2b(b"%d" % self._noises, digest_size=DIGEST_BYTES, person=b"noise").digest()
        return ((noise, encode_tokens([0] * self.block_size)),)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: str | None
) -> None:
    """Add the hashes of the complete blocks of a sequence that have none yet.

    A hash covers its block, all blocks before, and the cache salt.
    """
    for index in range(len(hashes), len(tokens) // block_size):
        before = hashes[-1] if hashes else (salt or "").encode()
        block = encode_tokens(tokens[index * block_size : (index + 1) * block_size])
        hashes.append(
            blake2b(b"%d:" % len(before) + before + block, digest_size=DIGEST_BYTES).digest()
        )
