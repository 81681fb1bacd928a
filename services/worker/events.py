"""The event socket: where the connector inside the engine reaches the sidecar."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog

from services.worker.event_hub import EventHub
from services.worker.event_messages import (
    Hello,
    Message,
    read_line,
    release_line,
    renew_line,
)
from services.worker.metrics import WorkerMetrics
from services.worker.tasks import background_tasks

_log = structlog.get_logger(__name__)

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longest line accepted. A handle of a 1M-token context takes about 2 MiB."""

_MAX_PATH_BYTES = 107  # sun_path holds 108 bytes with the final zero


@asynccontextmanager
async def listen(path: Path, hub: EventHub, metrics: WorkerMetrics) -> AsyncIterator[None]:
    """Serve connectors at a Unix socket while the block runs.

    The socket is readable and writable by its owner alone. One that an earlier
    process left behind is replaced.

    Raises:
        OSError: the path is too long for a Unix socket, it cannot be bound, or
            another process listens there.
    """
    listener = _bind(path)
    try:
        async with background_tasks() as connections:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                connection = _Connection(reader, writer, hub, metrics)
                connections.start(connection.serve(), name="event-connection")

            server = await asyncio.start_unix_server(accept, sock=listener, limit=MAX_LINE_BYTES)
            try:
                yield
            finally:
                server.close()
    finally:
        _unbind(path)


def _unbind(path: Path) -> None:
    path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(
            f"the event socket's path is longer than {_MAX_PATH_BYTES} bytes: {path}; "
            "choose a shorter one with --events-socket"
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.parent.stat().st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path.parent} belongs to another user, who could listen there")
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise FileExistsError(f"another process listens at {path}")


class _Connection:
    """One connector's connection; an EngineLink for the hub."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hub: EventHub,
        metrics: WorkerMetrics,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._hub = hub
        self._metrics = metrics

    async def serve(self) -> None:
        """Handle lines until the connection ends."""
        hello: Hello | None = None
        try:
            while line := await self._reader.readline():
                message = self._read(line)
                if isinstance(message, Hello):
                    hello = message
                    self._hub.connected(hello, self)
                elif hello is None:
                    _log.warning("event_connection_without_hello")
                    return
                elif message is not None:
                    self._hub.reported(hello.ref, message)
        except ValueError:
            self._metrics.event_lines_unreadable.inc()
            _log.warning("event_line_too_long", limit=MAX_LINE_BYTES)
        except ConnectionError as error:
            _log.info("event_connection_broken", error=str(error))
        finally:
            if hello is not None:
                self._hub.disconnected(hello.ref, self)
            self._writer.close()

    def send_release(self, request_ids: Sequence[str]) -> None:
        """Queue the line; the kernel takes it when it can."""
        self._send(release_line(request_ids))

    def send_renew(self, leases: Sequence[tuple[str, float]]) -> None:
        """Queue the line; the kernel takes it when it can."""
        self._send(renew_line(leases))

    def _send(self, line: bytes) -> None:
        # uvloop raises for a connection that has just broken. `serve` is about to see
        # that, and the connector tells of all its pins when it connects again.
        if not self._writer.is_closing():
            self._writer.write(line)

    def _read(self, line: bytes) -> Message | None:
        """The message; None if it is of a kind this version does not know."""
        try:
            return read_line(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._metrics.event_lines_unreadable.inc()
            _log.warning("event_line_unreadable", error=str(error), bytes=len(line))
            return None
