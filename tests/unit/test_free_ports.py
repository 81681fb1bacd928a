"""Ports that tests hold for servers to come."""

from __future__ import annotations

import socket

import pytest

from kvloop.stack.ports import PortPool
from tests.free_ports import held_port, held_ports


def test_held_ports_lie_in_a_row_below_those_that_linux_hands_out() -> None:
    with held_ports(3) as first:
        assert 1024 < first < 32768 - 3
        for port in range(first, first + 3):
            with socket.create_server(("127.0.0.1", port)):
                pass


def test_nobody_else_gets_a_held_port_before_it_is_let_go() -> None:
    with held_ports() as port, PortPool() as other:
        assert other.take(port) != port
    with PortPool() as other:
        assert other.take(port) == port


def test_a_port_is_held_until_the_process_ends() -> None:
    port = held_port()
    with PortPool() as other:
        assert other.take(port) != port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
