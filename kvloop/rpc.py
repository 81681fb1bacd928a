"""How kvloop opens gRPC channels: one place for limits, keepalive and retries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import grpc

from kvloop.errors import InvalidFieldError, KvloopError, from_rpc_error
from kvloop.rotation import RotatingAioChannel, RotatingChannel
from kvloop.tls import ClientTls, TlsSource

MAX_MESSAGE_BYTES = 128 * 1024 * 1024
"""Largest message on any hop. Block lists and token digests of a 1M-token
context take about 2 MiB; prompts with images take tens. gRPC's default of 4 MiB
is too small for both."""

MAX_METADATA_BYTES = 64 * 1024
"""Metadata of one call, trailers included. gRPC's default of 8 KiB is too small
for an engine's error body of 16 KiB in base64."""

OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # An engine's error body travels in the trailers; see `kvloop.errors`.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name this is how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Calls fail at once while a peer is away, so look for it often.
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_retries", 0),
    # A peer that was started anew at another address is found after a second.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]
"""Channel options. Retries are off: whether a call may be repeated is decided
where the meaning of the call is known."""

_ANSWER_WINDOW: list[tuple[str, int | str]] = [
    # gRPC would let a window grow to megabytes; a client of many streams whose own
    # readers are slow would hold that much for each of them.
    ("grpc.http2.lookahead_bytes", 256 * 1024),
    ("grpc.http2.bdp_probe", 0),
]
"""Further options of clients: how much of an answer may arrive before it is read."""

_WHY_TIMEOUT_SECONDS = 1.0


def make_channel(target: str, tls: TlsSource | None = None) -> grpc.Channel:
    """A channel of synchronous gRPC to host:port.

    Args:
        target: host:port.
        tls: how to speak TLS; without it nothing is encrypted.

    Raises:
        InvalidFieldError: the target is a URL.
    """
    check_target(target)
    options = [*OPTIONS, *_ANSWER_WINDOW]
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    return RotatingChannel(
        tls,
        lambda now: grpc.secure_channel(
            target, now.credentials(), options=[*options, *now.options()]
        ),
    )


def make_aio_channel(target: str, tls: TlsSource | None = None) -> grpc.aio.Channel:
    """A channel of `grpc.aio`; arguments as for `open_channel`."""
    check_target(target)
    if tls is None:
        return connect_aio(target, None)
    return RotatingAioChannel(tls.current, lambda now: connect_aio(target, now))


def connect_aio(
    target: str, tls: ClientTls | None, options: Sequence[tuple[str, int | str]] = ()
) -> grpc.aio.Channel:
    """A channel that speaks TLS as it is now.

    Args:
        target: as gRPC takes it.
        tls: how to speak TLS; without it nothing is encrypted.
        options: of gRPC, beside kvloop's own.
    """
    options = [*OPTIONS, *_ANSWER_WINDOW, *options]
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, tls.credentials(), options=[*options, *tls.options()])


def bearer(api_key: str) -> tuple[tuple[str, str | bytes], ...]:
    """Call metadata that carries an API key; empty for none."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def check_target(target: str) -> None:
    """Refuse URLs; gRPC would look for a host called http.

    Raises:
        InvalidFieldError: the target is a URL.
    """
    if target.startswith(("http://", "https://")):
        raise InvalidFieldError(f"{target!r} is a URL; expected host:port", field="address")


@asynccontextmanager
async def open_channel(
    target: str, tls: TlsSource | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel, closed on exit.

    Args:
        target: host:port.
        tls: how to speak TLS; without it nothing is encrypted.

    Raises:
        InvalidFieldError: the target is a URL.
    """
    async with make_aio_channel(target, tls) as channel:
        yield channel


async def connected(channel: grpc.aio.Channel) -> bool:
    """Wait until a channel is connected; False once an attempt has failed.

    A call made on a connected channel may have been carried out if it fails. One
    that was never made was not.
    """
    while True:
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return True
        # In the pause between two attempts, others may be a better choice.
        if state in (
            grpc.ChannelConnectivity.TRANSIENT_FAILURE,
            grpc.ChannelConnectivity.SHUTDOWN,
        ):
            return False
        await channel.wait_for_state_change(state)


async def why_not_connected(channel: grpc.aio.Channel) -> KvloopError | None:
    """Why the last attempt to connect failed; None if the channel is connected now.

    Only a call gets to know it. This one fails at once while there is no connection.
    """
    check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        "/grpc.health.v1.Health/Check"
    )
    try:
        await check(b"", timeout=_WHY_TIMEOUT_SECONDS, wait_for_ready=False)
    except grpc.RpcError as error:
        return from_rpc_error(error)
    return None


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turn gRPC errors raised inside into kvloop errors."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
