"""An answer that is too large to be kept anywhere, and tells how much of it was taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import overload

PIECE_BYTES = 64 * 1024
PIECES = 1024
MOST_KEPT = 384
"""Pieces that buffers on the way may hold: sockets, HTTP/2 windows, queues. A small part
of an answer of 64 MiB, and the same for one of any size."""


class CountedPieces(Sequence[bytes]):
    """The same piece again and again.

    Args:
        piece: what is repeated.
        last: pieces that end the answer.
    """

    def __init__(self, piece: bytes, last: Sequence[bytes] = ()) -> None:
        self._piece = piece
        self._last = last
        self.taken = 0
        """Pieces that were asked for."""

    def __len__(self) -> int:
        return PIECES + len(self._last)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        return [*self][index]

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(PIECES):
            self.taken += 1
            yield self._piece
        yield from self._last

    async def until_it_stops(self) -> int:
        """Wait until nobody asks for more; how much was taken."""
        before = -1
        while self.taken != before or not before:
            before = self.taken
            await asyncio.sleep(0.2)
        return self.taken
