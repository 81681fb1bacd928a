"""The engine's end of the event socket between connector and sidecar.

The connector runs in vLLM's scheduler, which must never wait. So a thread owns
the Unix socket: events go into a bounded queue, and releases and renewals asked for
by the sidecar are collected until the scheduler fetches them.

Every line is one JSON object. Only the standard library is used: this module
runs inside vLLM.
"""

from __future__ import annotations

import collections
import json
import logging
import queue
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_log = logging.getLogger("vllm.kvloop.events")
_Item = TypeVar("_Item")

MAX_QUEUED = 10_000
"""Events kept while no sidecar is connected. Beyond it the oldest is dropped:
its turn is not committed, and its blocks fall at the engine's TTL."""

EVENTS_SOCKET = "KVLOOP_EVENTS_SOCKET"
"""Environment variable with the path of the sidecar's event socket."""
_RETRY_SECONDS = 0.2
_CLOSE = object()


class EngineEvents:
    """Sends events to the sidecar and collects what it asks for.

    Args:
        path: the sidecar's Unix socket.
        hello: first event of every connection; says which engine this is.
        pins: what the engine retains; the second event of every connection. Called
            in another thread. An event that was queued before may follow and tell
            of a pin that is in it, or is gone from it.
        on_request: called in another thread when the sidecar has asked for something.
    """

    def __init__(
        self,
        path: str,
        hello: dict[str, Any],
        *,
        pins: Callable[[], list[dict[str, Any]]] = list,
        on_request: Callable[[], None] | None = None,
    ) -> None:
        self._path = path
        self._hello = _encode({"type": "hello", **hello})
        self._pins = pins
        self._on_request = on_request
        self._outgoing: queue.Queue[Any] = queue.Queue()
        self._unsent: bytes | None = None
        self._releases: collections.deque[str] = collections.deque()
        self._renewals: collections.deque[tuple[str, float]] = collections.deque()
        self._closed = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvloop-events", daemon=True)
        self._thread.start()

    def send(self, event: dict[str, Any]) -> None:
        """Queue an event. Never blocks.

        The event is encoded here, so that later changes to it do not matter.
        """
        if self._outgoing.qsize() >= MAX_QUEUED:
            try:
                self._outgoing.get_nowait()
                _log.warning("kvloop event queue is full; the oldest event is dropped")
            except queue.Empty:
                pass
        self._outgoing.put(_encode(event))
        self._wake()

    def take_releases(self) -> list[str]:
        """Engine request ids whose blocks the sidecar wants freed, each once."""
        return _take_all(self._releases)

    def take_renewals(self) -> list[tuple[str, float]]:
        """Pins whose deadline the sidecar wants moved, and to how many seconds from
        now, each once."""
        return _take_all(self._renewals)

    def close(self) -> None:
        """Send what is queued, if the sidecar is there, and stop."""
        self._closed.set()
        self._outgoing.put(_CLOSE)
        self._wake()
        self._thread.join(timeout=2)
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # a wake-up is pending already, or the socket is closed

    def _run(self) -> None:
        reported = False
        while not self._closed.is_set():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.connect(self._path)
                    connection.sendall(self._hello)
                    connection.sendall(_encode({"type": "pins", "pins": self._pins()}))
                    reported = False
                    self._serve(connection)
            except OSError as error:
                if not reported:
                    _log.warning("kvloop sidecar is not reachable at %s: %s", self._path, error)
                    reported = True
            self._closed.wait(_RETRY_SECONDS)

    def _serve(self, connection: socket.socket) -> None:
        """Exchange lines until the connection or this object is closed."""
        received = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while True:
                if self._flush(connection):
                    return
                for key, _ in selector.select():
                    if key.fileobj is self._wake_reader:
                        self._wake_reader.recv(4096)
                        continue
                    data = connection.recv(65536)
                    if not data:
                        raise ConnectionResetError("the sidecar closed the connection")
                    received += data
                    *lines, rest = received.split(b"\n")
                    received = rest
                    for line in lines:
                        self._receive(bytes(line))

    def _flush(self, connection: socket.socket) -> bool:
        """Send everything queued; True if closing was asked for.

        An event leaves the queue only once it is sent, so that a connection
        that breaks in between does not lose it.
        """
        while True:
            if self._unsent is None:
                try:
                    item = self._outgoing.get_nowait()
                except queue.Empty:
                    return False
                if item is _CLOSE:
                    return True
                self._unsent = item
            connection.sendall(self._unsent)
            self._unsent = None

    def _receive(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            if message["type"] == "release":
                self._releases.extend([str(request_id) for request_id in message["request_ids"]])
            elif message["type"] == "renew":
                self._renewals.extend(
                    [(str(request_id), float(seconds)) for request_id, seconds in message["pins"]]
                )
            else:
                return
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("kvloop sidecar sent a line that cannot be read: %s", error)
            return
        if self._on_request is not None:
            self._on_request()


def _take_all(queued: collections.deque[_Item]) -> list[_Item]:
    taken = []
    while queued:
        taken.append(queued.popleft())
    return taken


def _encode(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"
