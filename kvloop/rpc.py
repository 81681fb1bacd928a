"""How kvloop opens gRPC channels: one place for limits, keepalive and retries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc

from kvloop.errors import from_rpc_error

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
]
"""Channel options. Retries are off: whether a call may be repeated is decided
where the meaning of the call is known."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a client speaks TLS. All values are PEM.

    Attributes:
        root_certificates: authorities to trust; by default those of gRPC.
        certificate_chain: the client's own certificate, for mutual TLS.
        private_key: key of that certificate.
    """

    root_certificates: bytes | None = None
    certificate_chain: bytes | None = None
    private_key: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """The same for gRPC."""
        return grpc.ssl_channel_credentials(
            self.root_certificates, self.private_key, self.certificate_chain
        )


def bearer(api_key: str) -> tuple[tuple[str, str | bytes], ...]:
    """Call metadata that carries an API key; empty for none."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


@asynccontextmanager
async def open_channel(target: str) -> AsyncIterator[grpc.aio.Channel]:
    """An insecure channel to host:port, closed on exit."""
    async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
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


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turn gRPC errors raised inside into kvloop errors."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
