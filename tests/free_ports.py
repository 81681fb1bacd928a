"""Ports of loopback for servers that come later, go away or come back.

A server on port 0 gets one of Linux's ephemeral ports (32768 to 60999, if nobody chose
others). Once it is closed, or before it is opened, the next connection or server of any
process may get the same one. The ports here lie below those and above kvloop's defaults,
and no other test gets them while they are held.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvloop.stack.ports import PortPool

_FIRST, _LAST = 22000, 31999

_until_exit = ExitStack()
atexit.register(_until_exit.close)


@contextmanager
def held_ports(count: int = 1) -> Iterator[int]:
    """The first of some ports in a row, which are held while the block runs."""
    while True:
        first = _FIRST + secrets.randbelow(_LAST - _FIRST - count)
        with PortPool() as pool:
            if all(pool.take(port) == port for port in range(first, first + count)):
                yield first
                return


def held_port() -> int:
    """A port that is held until this process ends."""
    return _until_exit.enter_context(held_ports())
