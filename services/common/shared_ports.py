"""Ports on which several processes of one service listen (SO_REUSEPORT)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.addresses import join_host_port, split_host_port


def listening_socket(address: str, *, backlog: int, shared: bool = False) -> socket.socket:
    """A TCP socket that listens.

    Args:
        address: host:port; port 0 takes a free one.
        backlog: connections that may wait to be accepted.
        shared: other processes may listen on the same port; the kernel spreads
            connections over them.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = _bound(address, shared=shared)
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


@contextmanager
def reserve(address: str) -> Iterator[str]:
    """Keep a port for processes that will share it, while the block runs.

    Args:
        address: host:port; port 0 takes a free one.

    Yields:
        The address with its port.

    Raises:
        OSError: the address cannot be bound, or others listen there: sharing would
            mix their connections with ours.
    """
    host, _ = split_host_port(address)
    with _bound(address, shared=False) as probe:
        port = probe.getsockname()[1]
    # It is bound and does not listen, so it gets no connections.
    with _bound(join_host_port(host, port), shared=True):
        yield join_host_port(host, port)


def _bound(address: str, *, shared: bool) -> socket.socket:
    host, port = split_host_port(address)
    try:
        family, kind, protocol, _, resolved = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Without the protocol asyncio does not take it for TCP, and leaves Nagle's
        # algorithm on: small chunks then wait 40 ms for an acknowledgement.
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(resolved)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    return bound
