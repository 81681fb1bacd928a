"""A connection whose other end can vanish without a word, as in a failover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from tests.links import Link, Passing


class VanishingLink(Link):
    """A relay to a Unix socket.

    Args:
        target: the socket's path.
    """

    def __init__(self, target: Path) -> None:
        super().__init__(partial(asyncio.open_unix_connection, target))
        self._lives = 1

    def vanish(self) -> None:
        """Swallow from now on what connections of before say; new ones work."""
        self._lives += 1

    def passing(self) -> tuple[Passing, Passing]:
        """Everything, for as long as the server of now is there."""
        life = self._lives

        async def while_there(data: bytes) -> AsyncIterator[bytes]:
            if life == self._lives:
                yield data

        return while_there, while_there
