"""Where the replicas behind a name are: asked again and again, and not forgotten at once.

gRPC looks a name up when one of its connections breaks, and at no other time. A replica
that was away just then, or that is added later, stays unknown until the next break; and
when the replicas that are known leave, calls fail although others serve.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import structlog

_log = structlog.get_logger(__name__)

KEEP_SECONDS = 60.0
"""How long an address is called on after it was last seen: longer than a restart takes."""

LookUp = Callable[[str], Awaitable[Collection[str]]]
"""The IP addresses of a host. Raises as `look_up` does."""


async def look_up(host: str) -> frozenset[str]:
    """The IP addresses of a host, as the system's resolver knows them.

    Raises:
        OSError: the host is unknown, or no name server answers.
        ValueError: it cannot be the name of a host.
        RuntimeError: the system starts no more threads.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[frozenset[str]] = loop.create_future()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            tell(answer.set_exception, error)
        else:
            tell(answer.set_result, frozenset(str(address[0]) for *_, address in found))

    def tell(end: Callable[[Any], None], outcome: object) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, end, outcome)

    def settle(end: Callable[[Any], None], outcome: object) -> None:
        if not answer.done():
            end(outcome)

    # The loop's own look-ups keep a process from ending while no name server answers.
    threading.Thread(target=ask, name=f"look up {host}", daemon=True).start()
    return await answer


def remembered(
    seen: Mapping[str, float], found: Collection[str], now: float, keep_seconds: float
) -> dict[str, float]:
    """The addresses to call, with the time at which each was last seen.

    Args:
        seen: the same until now.
        found: addresses that a look-up has just found.
        now: seconds, on the clock of `seen`.
        keep_seconds: how long an address is kept that look-ups do not find any more. A
            replica that restarts is away for a while, and comes back.
    """
    kept = {address: last for address, last in seen.items() if now - last < keep_seconds}
    return kept | dict.fromkeys(found, now)


def target_of(addresses: Collection[str], port: int) -> str | None:
    """gRPC's target for IP addresses; None if there are none, or of both families.

    gRPC takes lists of one family only.
    """
    versions = {ipaddress.ip_address(address).version for address in addresses}
    if len(versions) != 1:
        return None
    if versions == {4}:
        return "ipv4:" + ",".join(f"{address}:{port}" for address in sorted(addresses))
    return "ipv6:" + ",".join(f"[{address}]:{port}" for address in sorted(addresses))


class ReplicaAddresses:
    """The addresses behind one name.

    Args:
        host: the name.
        port: port of every replica.
        look_up: asks for the addresses.
        clock: seconds on a clock that never goes back.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        look_up: LookUp = look_up,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._port = port
        self._look_up = look_up
        self._clock = clock
        self._seen: dict[str, float] = {}
        self.target: str | None = None
        """gRPC's target for what is known; None if that is nothing that gRPC takes."""

    async def refresh(self) -> None:
        """Look the name up. Without an answer, what is known stays."""
        try:
            found = await self._look_up(self._host)
        except (OSError, ValueError, RuntimeError):  # no answer; no name at all; no thread to ask
            return
        self._seen = remembered(self._seen, found, self._clock(), KEEP_SECONDS)
        target = target_of(self._seen, self._port)
        if target != self.target:
            _log.info("replicas_changed", name=self._host, addresses=sorted(self._seen))
            self.target = target
