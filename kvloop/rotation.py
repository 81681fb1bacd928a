"""Channels whose TLS credentials or addresses change while they are used.

gRPC for Python fixes a channel's credentials when the channel is made (its core
can watch files, but the Python package offers that to xDS alone), and looks a name
up again only when a connection breaks. So a rotating channel is a row of channels
behind one: when the certificates or the addresses change, a new one is opened, and
further calls go there. Calls that run stay where they are. A channel that was left
is closed by gRPC when its last call ends, as nothing refers to it any more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from kvloop.tls import ClientTls, TlsSource

P = TypeVar("P")


def _on_current_channel(shape: str) -> Any:
    """A method of a channel that makes RPC methods of this shape.

    What it makes asks for the current channel at every call.
    """

    def make(
        self: RotatingAioChannel[Any] | RotatingChannel,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        # A method is registered with one channel, so here none is.
        _registered_method: bool | None = False,
    ) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            channel = self.current()
            make_method = getattr(channel, shape)
            running = make_method(method, request_serializer, response_deserializer)(
                *args, **kwargs
            )
            self.hold(running, channel)
            return running

        return call

    make.__name__ = shape
    make.__doc__ = f"See `{shape}` of gRPC's channels."
    return make


class RotatingAioChannel(grpc.aio.Channel, Generic[P]):
    """A channel of `grpc.aio` that follows what it was opened with.

    Args:
        newest: how to connect now; the same object until that has changed.
        open_channel: opens a channel that connects so.
    """

    def __init__(
        self, newest: Callable[[], P], open_channel: Callable[[P], grpc.aio.Channel]
    ) -> None:
        self._look = newest
        self._open = open_channel
        self._newest = newest()
        self._channel = open_channel(self._newest)
        self._next: grpc.aio.Channel | None = None
        self._left: weakref.WeakSet[grpc.aio.Channel] = weakref.WeakSet()

    unary_unary: Any = _on_current_channel("unary_unary")
    unary_stream: Any = _on_current_channel("unary_stream")
    stream_unary: Any = _on_current_channel("stream_unary")
    stream_stream: Any = _on_current_channel("stream_stream")

    def current(self) -> grpc.aio.Channel:
        """The channel for the next call.

        A new one takes over when it is connected, and not before: new certificates that the
        peer refuses do no harm as long as it takes the old ones.
        """
        newest = self._look()
        if newest is not self._newest:
            self._newest, self._next = newest, self._open(newest)
        ready = grpc.ChannelConnectivity.READY
        # Being asked so makes it connect.
        if self._next is not None and self._next.get_state(try_to_connect=True) is ready:
            self._left.add(self._channel)
            self._channel, self._next = self._next, None
        return self._channel

    @staticmethod
    def hold(running: Any, channel: Any) -> None:
        """Keep a channel that may be left as long as a call runs on it."""
        running.add_done_callback(lambda _, channel=channel: None)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """State of the channel for the next call."""
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See `grpc.aio.Channel`."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See `grpc.aio.Channel`."""
        await self.current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Close all channels; calls that run get `grace` seconds."""
        for channel in (*self._left, self._channel, self._next):
            if channel is not None:
                await channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class RotatingChannel(grpc.Channel):
    """A channel of synchronous gRPC that follows its TLS files. Safe for threads.

    Args:
        tls: how to speak TLS now.
        open_channel: opens a channel that speaks it so.
    """

    def __init__(self, tls: TlsSource, open_channel: Callable[[ClientTls], grpc.Channel]) -> None:
        self._tls = tls
        self._open = open_channel
        self._lock = threading.Lock()
        self._newest = tls.current()
        self._channel = open_channel(self._newest)

    unary_unary: Any = _on_current_channel("unary_unary")
    unary_stream: Any = _on_current_channel("unary_stream")
    stream_unary: Any = _on_current_channel("stream_unary")
    stream_stream: Any = _on_current_channel("stream_stream")

    def current(self) -> grpc.Channel:
        """The channel for the next call."""
        newest = self._tls.current()
        with self._lock:
            if newest is not self._newest:
                self._newest, self._channel = newest, self._open(newest)
            return self._channel

    @staticmethod
    def hold(running: Any, channel: Any) -> None:
        """Nothing to do: calls of synchronous gRPC hold their channel themselves."""

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        """Watch the channel that is current now; not those that follow it."""
        self.current().subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Any) -> None:
        """See `grpc.Channel`."""
        self.current().unsubscribe(callback)

    def close(self) -> None:
        """Close the current channel; calls that run on it are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
