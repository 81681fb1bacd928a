"""Channels to a name of several replicas that share their state."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import grpc

from kvloop import rpc
from kvloop.rotation import RotatingAioChannel
from kvloop.tls import ClientTls, TlsSource
from services.common.addresses import split_host_port
from services.common.replica_addresses import LookUp, ReplicaAddresses, look_up

LOOK_UP_EVERY = 5
"""Seconds between two look-ups while a replica answers; without one, every second."""

FIRST_LOOK_UP_SECONDS = 1.0
"""How long opening waits for the first answer. Until one has come, gRPC looks the name up."""

_OPTIONS: list[tuple[str, int | str]] = [
    (
        "grpc.service_config",
        json.dumps(
            {
                "loadBalancingConfig": [{"round_robin": {}}],
                "healthCheckConfig": {"serviceName": ""},
            }
        ),
    )
]
"""By watching each replica's health, calls stop going to it as soon as it says that it
is about to leave."""


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """How to connect: to which of gRPC's targets, and by which TLS."""

    target: str
    tls: ClientTls | None


class _Ways:
    """The way to a name's replicas, as it is now."""

    def __init__(
        self, name: str, host: str, addresses: ReplicaAddresses, tls: TlsSource | None
    ) -> None:
        self._name = name
        self._host = host
        self._addresses = addresses
        self._tls = tls
        self._now: _Way | None = None

    def newest(self) -> _Way:
        """The same object until something has changed."""
        target = self._addresses.target or self._name
        tls = None if self._tls is None else self._tls.current()
        if self._now is None or self._now.target != target or self._now.tls is not tls:
            self._now = _Way(target, tls)
        return self._now

    def connect(self, way: _Way) -> grpc.aio.Channel:
        """A channel of that way."""
        options = list(_OPTIONS)
        if way.target != self._name:
            # gRPC would take the first address for the name of the server, and know none of
            # the names that go without a proxy.
            options += [("grpc.default_authority", self._name), ("grpc.enable_http_proxy", 0)]
            if way.tls is not None and not way.tls.server_name:
                options.append(("grpc.ssl_target_name_override", self._host))
        return rpc.connect_aio(way.target, way.tls, options)


@asynccontextmanager
async def open_replicated_channel(
    target: str,
    tls: TlsSource | None = None,
    *,
    look_up: LookUp = look_up,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that goes round the healthy replicas behind a name, closed on exit.

    The name is looked up every few seconds. A replica that is added takes its share of
    calls soon after; one that is away for a while is called again when it is back.

    Args:
        target: host:port. An IP address, or a target of gRPC with a scheme, is all there
            is: it is not looked up.
        tls: how to speak TLS; without it nothing is encrypted.
        look_up: asks for the addresses of a host.
        clock: seconds on a clock that never goes back.
        sleep: waits for some seconds.

    Raises:
        InvalidFieldError: the target is a URL.
    """
    rpc.check_target(target)
    name = _name_in(target)
    addresses = ReplicaAddresses(*name or ("", 0), look_up=look_up, clock=clock)
    ways = _Ways(target, name[0] if name else "", addresses, tls)
    if name is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_UP_SECONDS):
                await addresses.refresh()
    async with RotatingAioChannel(ways.newest, ways.connect) as channel:
        if name is None:
            yield channel
            return
        following = asyncio.create_task(_follow(channel, addresses, sleep))
        try:
            yield channel
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


def _name_in(target: str) -> tuple[str, int] | None:
    """Host and port of a target; None if there is no name to look up."""
    try:
        host, port = split_host_port(target)
    except ValueError:
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host, port
    return None


async def _follow(
    channel: grpc.aio.Channel,
    addresses: ReplicaAddresses,
    sleep: Callable[[float], Awaitable[object]],
) -> NoReturn:
    for tick in itertools.count(1):
        await sleep(1.0)
        # Being asked, it goes over to what the last look-up has found.
        ready = channel.get_state() is grpc.ChannelConnectivity.READY
        if not ready or tick % LOOK_UP_EVERY == 0:
            await addresses.refresh()
    raise AssertionError("it counts for ever")
