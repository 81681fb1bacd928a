"""Channels to a name of several replicas that share their state."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import grpc

from kvloop import rpc
from kvloop.rotation import RotatingAioChannel
from kvloop.tls import ClientTls, TlsSource
from services.common.addresses import split_host_port
from services.common.replica_addresses import LookUp, ReplicaAddresses, look_up

LOOK_UP_SECONDS = 1.0
"""Between two look-ups: as long as gRPC waits at least between two of its own."""

FIRST_LOOK_UP_SECONDS = 1.0
"""How long opening waits for the first answer. Until one has come, gRPC looks the name up."""

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Where gRPC looks for a proxy; it looks at no others."""

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
            # No proxy stands before the name, so none does before its addresses.
            options.append(("grpc.enable_http_proxy", 0))
            # By itself gRPC would know the server by its first address.
            if way.tls is None:
                options.append(("grpc.default_authority", self._name))
            elif not way.tls.server_name:
                options.append(("grpc.ssl_target_name_override", self._host))
        return rpc.connect_aio(way.target, way.tls, options)


@asynccontextmanager
async def open_replicated_channel(
    target: str,
    tls: TlsSource | None = None,
    *,
    look_up: LookUp = look_up,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that goes round the healthy replicas behind a name, closed on exit.

    The name is looked up every second. A replica that is added takes its share of
    calls soon after; one that is away for a while is called again when it is back.
    Streams stay on the addresses that they were opened with: see
    `services.common.long_streams`.

    Args:
        target: host:port. An IP address, or a target of gRPC with a scheme, is all there
            is: it is not looked up. Nor is a host to which the environment names a proxy.
        tls: how to speak TLS; without it nothing is encrypted.
        look_up: asks for the addresses of a host.
        sleep: waits for some seconds.

    Raises:
        InvalidFieldError: the target is a URL.
    """
    rpc.check_target(target)
    name = _name_in(target)
    addresses = ReplicaAddresses(*name or ("", 0), look_up=look_up)
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
            await asyncio.wait([following])


def _name_in(target: str) -> tuple[str, int] | None:
    """Host and port of a target; None if there is no name to look up."""
    try:
        host, port = split_host_port(target)
    except ValueError:
        return None
    if has_proxy(host, os.environ):
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host, port
    return None


def has_proxy(host: str, environment: Mapping[str, str]) -> bool:
    """Whether gRPC reaches a host through a proxy, to which it gives the name."""
    if not any(environment.get(name) for name in _PROXIES):
        return False
    without = environment.get("no_grpc_proxy") or environment.get("no_proxy") or ""
    return not urllib.request.proxy_bypass(host, {"no": without})


async def _follow(
    channel: grpc.aio.Channel,
    addresses: ReplicaAddresses,
    sleep: Callable[[float], Awaitable[object]],
) -> NoReturn:
    while True:
        await sleep(LOOK_UP_SECONDS)
        await addresses.refresh()
        # Being asked, it goes over to what has been found.
        channel.get_state()
