"""A port that several processes share, and nobody else."""

from __future__ import annotations

import select
import socket
from collections import Counter

import pytest

from services.common.addresses import split_host_port
from services.common.shared_ports import listening_socket, reserve


def test_several_sockets_listen_on_a_reserved_port_and_get_all_connections() -> None:
    with reserve("127.0.0.1:0") as address:
        first = listening_socket(address, backlog=64, shared=True)
        second = listening_socket(address, backlog=64, shared=True)
        with first, second:
            clients = [socket.create_connection(split_host_port(address)) for _ in range(40)]
            taken = _accept_all(first, second, count=len(clients))
            for client in clients:
                client.close()
    assert sum(taken.values()) == 40
    assert all(taken[listener] for listener in (first, second))


def test_a_reserved_port_is_not_open_before_somebody_listens() -> None:
    with reserve("127.0.0.1:0") as address, pytest.raises(ConnectionRefusedError):
        socket.create_connection(split_host_port(address))


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_where_others_listen_is_not_shared_with_them(shared: bool) -> None:
    with listening_socket("127.0.0.1:0", backlog=1, shared=shared) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {address}"), reserve(address):
            pass


def test_small_writes_are_not_held_back() -> None:
    """asyncio switches Nagle's algorithm off on sockets whose protocol says TCP."""
    with listening_socket("127.0.0.1:0", backlog=1) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def _accept_all(*listeners: socket.socket, count: int) -> Counter[socket.socket]:
    """How many of the connections each listener got."""
    taken: Counter[socket.socket] = Counter()
    while taken.total() < count:
        ready, _, _ = select.select(listeners, [], [], 20)
        assert ready, taken
        for listener in ready:
            accepted, _ = listener.accept()
            accepted.close()
            taken[listener] += 1
    return taken
