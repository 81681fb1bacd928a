"""What a simulated KV block holds, and what a sequence reads out of its blocks.

A real KV slot holds numbers computed from its token and from everything that
attention saw before it. Here a block holds the same facts in short: the digest
of all slots before (the seed) and its own tokens. The digest of a whole sequence
reads every slot of every block in its block table. So a block that was pulled
from the wrong place, or that belongs to someone else by now, changes all that
the model says afterwards; and a block that was pulled rightly is the same, bit
for bit, as one computed here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableMapping, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
_TOKEN_BYTES = 4

Run = tuple[bytes, bytes]
"""(seed, tokens): slots computed one after the other by one sequence."""
Content = tuple[Run, ...]
"""What a block holds. Usually one run; several if sequences that did not fit
together wrote into it, as after a pull of the wrong block."""

EMPTY: Content = ()


def encode_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as a block holds them."""
    return array("I", tokens).tobytes()


def num_slots(content: Content) -> int:
    """Slots of a block that have been written."""
    return sum(len(tokens) // _TOKEN_BYTES for _, tokens in content)


def start_digest(model: str) -> bytes:
    """The digest of no slots at all: different models never agree."""
    return blake2b(model.encode(), digest_size=DIGEST_BYTES, person=b"kvloop-sim").digest()


def read_slots(before: bytes, content: Content, slots: int) -> bytes:
    """The digest after reading the first slots of a block.

    Args:
        before: digest of all slots of the blocks before.
        content: what the block holds.
        slots: how many of its slots the sequence has. A slot that was never
            written reads as nothing that any model computes.
    """
    if len(content) == 1 and len(content[0][1]) >= slots * _TOKEN_BYTES:
        seed, tokens = content[0]
        return blake2b(
            before + seed + tokens[: slots * _TOKEN_BYTES], digest_size=DIGEST_BYTES
        ).digest()
    digest = blake2b(before, digest_size=DIGEST_BYTES, person=b"odd-block")
    left = slots
    for seed, tokens in content:
        part = tokens[: left * _TOKEN_BYTES]
        left -= len(part) // _TOKEN_BYTES
        digest.update(b"%d:" % len(part) + seed + part)
    digest.update(b"missing:%d" % left)
    return digest.digest()


def write_slots(content: Content, slot: int, block_start: bytes, tokens: bytes) -> Content:
    """What a block holds after tokens were computed into it.

    Args:
        content: what it held before.
        slot: first slot written. What it held from there on is overwritten.
        block_start: the sequence's digest at the start of the block.
        tokens: encoded tokens, one per slot.
    """
    if slot == 0:
        return ((block_start, tokens),)
    if len(content) == 1:
        seed, held = content[0]
        if seed == block_start and len(held) >= slot * _TOKEN_BYTES:
            return ((seed, held[: slot * _TOKEN_BYTES] + tokens),)
    return (*_first_slots(content, slot), (read_slots(block_start, content, slot), tokens))


def _first_slots(content: Content, slots: int) -> Content:
    kept: list[Run] = []
    left = slots * _TOKEN_BYTES
    for seed, tokens in content:
        if left <= 0:
            break
        kept.append((seed, tokens[:left]))
        left -= len(tokens)
    return tuple(kept)


class KvReader:
    """One sequence's view of its blocks, from the first slot to the last computed.

    Args:
        memory: content by block id, shared by all sequences of an engine.
        block_size: slots per block.
        start: digest of no slots.
    """

    def __init__(self, memory: MutableMapping[int, Content], block_size: int, start: bytes) -> None:
        self._memory = memory
        self._block_size = block_size
        self._start = start
        self._slots = 0
        self._block_start = start  # digest of all complete blocks

    @property
    def slots(self) -> int:
        """Slots read or written so far."""
        return self._slots

    def load(self, blocks: Sequence[int], slots: int) -> None:
        """Begin again with slots that are there already: cached or pulled."""
        self._block_start = self._start
        for block in blocks[: slots // self._block_size]:
            self._block_start = read_slots(
                self._block_start, self._memory.get(block, EMPTY), self._block_size
            )
        self._slots = slots

    def write(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Compute tokens into the slots that follow."""
        done = 0
        while done < len(tokens):
            index, slot = divmod(self._slots, self._block_size)
            take = min(len(tokens) - done, self._block_size - slot)
            block = blocks[index]
            held = self._memory.get(block, EMPTY)
            self._memory[block] = write_slots(
                held, slot, self._block_start, encode_tokens(tokens[done : done + take])
            )
            done += take
            self._slots += take
            if slot + take == self._block_size:
                self._block_start = read_slots(
                    self._block_start, self._memory[block], self._block_size
                )

    def digest(self, blocks: Sequence[int]) -> bytes:
        """Digest of all slots: what the next token depends on."""
        index, slot = divmod(self._slots, self._block_size)
        if not slot:
            return self._block_start
        return read_slots(self._block_start, self._memory.get(blocks[index], EMPTY), slot)
