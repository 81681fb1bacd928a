"""Splitting and joining host:port, IPv6 included."""

from __future__ import annotations

import ipaddress


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """The bare host and the port of `host:port` or `[v6]:port`.

    Raises:
        ValueError: there is a scheme, no port, or an IPv6 host without brackets.
    """
    if "//" in address:
        raise ValueError(f"{address!r} has a scheme; expected host:port")
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or not host or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"{address!r}: an IPv6 host needs brackets, as in [::1]:8100")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the host."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
