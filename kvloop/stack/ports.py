"""Free ports, kept free of other stacks on this machine."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

LOOPBACK = "127.0.0.1"


class PortPool:
    """Hands out free loopback ports and holds them until it is closed.

    An engine binds its port a minute after it was chosen. To keep a second stack
    from choosing it meanwhile, each port is held by a socket in the abstract
    Unix namespace, which vanishes with this process.
    """

    def __init__(self) -> None:
        self._holds: list[socket.socket] = []

    def take(self, preferred: int) -> int:
        """The first free port from `preferred` upward.

        Raises:
            OSError: none of a hundred ports is free.
        """
        for port in range(preferred, preferred + 100):
            hold = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                hold.bind(f"\0kvloop-port-{port}")
                _check_free(port)
            except OSError:
                hold.close()
                continue
            self._holds.append(hold)
            return port
        raise OSError(f"no free port in {preferred} to {preferred + 99}")

    def close(self) -> None:
        """Let all ports go."""
        while self._holds:
            self._holds.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connection lingers counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((LOOPBACK, port))
        probe.listen()
