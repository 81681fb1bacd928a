"""The side channel over TCP: one framed msgpack request and reply per call."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import structlog

from services.sim.kv import Content
from services.sim.peers import PeerError, PeerInfo, SideChannel
from services.worker.tasks import background_tasks

_log = structlog.get_logger(__name__)

_CALL_SECONDS = 10.0
_MAX_FRAME = 256 * 1024 * 1024
_LENGTH = struct.Struct("!I")


class _Meet(msgspec.Struct, tag="meet"):
    pass


class _Read(msgspec.Struct, tag="read"):
    epoch: str
    blocks: list[int]
    request_id: str


class _Notify(msgspec.Struct, tag="notify"):
    epoch: str
    request_id: str


class _Renew(msgspec.Struct, tag="renew"):
    epoch: str
    request_ids: list[str]


class _Reply(msgspec.Struct, omit_defaults=True):
    error: str | None = None
    peer: PeerInfo | None = None
    contents: list[Content] = []


_Request = _Meet | _Read | _Notify | _Renew
_REQUEST = msgspec.msgpack.Decoder(_Request)
_REPLY = msgspec.msgpack.Decoder(_Reply)


class TcpPeers:
    """Implements Peers; each call has a connection of its own."""

    async def meet(self, host: str, port: int) -> PeerInfo:
        """Shake hands."""
        reply = await _call(host, port, _Meet())
        if reply.peer is None:
            raise PeerError("the peer's handshake is empty")
        return reply.peer

    async def read(
        self, host: str, port: int, epoch: str, blocks: Sequence[int], request_id: str
    ) -> list[Content]:
        """Read blocks and tell the peer so."""
        return (await _call(host, port, _Read(epoch, list(blocks), request_id))).contents

    async def notify(self, host: str, port: int, epoch: str, request_id: str) -> None:
        """Tell the peer that a request's blocks are not needed."""
        await _call(host, port, _Notify(epoch, request_id))

    async def renew(self, host: str, port: int, epoch: str, request_ids: Sequence[str]) -> None:
        """Ask the peer to keep requests' blocks for longer."""
        await _call(host, port, _Renew(epoch, list(request_ids)))


@asynccontextmanager
async def serve(channel: SideChannel, listener: socket.socket) -> AsyncIterator[None]:
    """Serve a side channel while the block runs.

    At the end open connections are cut, as when the engine's process dies.
    """
    async with background_tasks() as connections:

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.start(_answer(channel, reader, writer), name="side-channel-connection")

        server = await asyncio.start_server(accept, sock=listener)
        try:
            yield
        finally:
            server.close()


async def _answer(
    channel: SideChannel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while True:
            reply = _dispatch(channel, _REQUEST.decode(await _receive(reader)))
            writer.write(_frame(msgspec.msgpack.encode(reply)))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    except (msgspec.DecodeError, ValueError) as error:
        _log.warning("side_channel_request_unreadable", error=str(error))
    finally:
        writer.close()


def _dispatch(channel: SideChannel, request: _Request) -> _Reply:
    try:
        match request:
            case _Meet():
                return _Reply(peer=channel.meet())
            case _Read():
                contents = channel.read(request.epoch, request.blocks, request.request_id)
                return _Reply(contents=contents)
            case _Notify():
                channel.notify(request.epoch, request.request_id)
            case _Renew():
                channel.renew(request.epoch, request.request_ids)
    except PeerError as error:
        return _Reply(error=str(error))
    return _Reply()


async def _call(host: str, port: int, request: _Request) -> _Reply:
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_frame(msgspec.msgpack.encode(request)))
                reply = _REPLY.decode(await _receive(reader))
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        # A msgspec.DecodeError is a ValueError.
        raise PeerError(f"{host}:{port}: {type(error).__name__}: {error}") from error
    if reply.error is not None:
        raise PeerError(f"{host}:{port}: {reply.error}")
    return reply


async def _receive(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _MAX_FRAME:
        raise ValueError(f"frame of {length} bytes")
    return await reader.readexactly(length)


def _frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload
