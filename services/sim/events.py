"""The connector's end of the event socket, as services/worker/engine_events.py.

That one runs in a thread beside vLLM's scheduler; this one on the event loop, so
that hundreds of engines need no threads. The lines are the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

import msgspec
import structlog

from services.common.backoff import Backoff
from services.sim.spec import EngineSpec, Identity
from services.worker.clock import Clock
from services.worker.proof import CONTRACT_VERSION
from services.worker.race import race
from services.worker.tasks import BackgroundTasks

_log = structlog.get_logger(__name__)

_MAX_QUEUED = 10_000
_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 2.0
_MAX_LINE_BYTES = 16 * 1024 * 1024


class _Release(msgspec.Struct, tag="release", tag_field="type"):
    request_ids: list[str]


class _Renew(msgspec.Struct, tag="renew", tag_field="type"):
    pins: list[tuple[str, float]]


_REQUEST: msgspec.json.Decoder[_Release | _Renew] = msgspec.json.Decoder(_Release | _Renew)


class PinKeeper(Protocol):
    """What the sidecar can do to an engine's pins."""

    def snapshot(self) -> dict[str, Any]:
        """The event that says what is retained now."""

    def release(self, request_ids: list[str]) -> None:
        """Free these requests' blocks."""

    def renew(self, leases: list[tuple[str, float]]) -> None:
        """Keep these requests' blocks for so many seconds from now."""


class EventLink:
    """Sends events to the sidecar and passes on what it asks for.

    Args:
        path: the sidecar's Unix socket.
        hello: first event of every connection.
        pins: the engine's pins.
        clock: paces retries and delays.
        tasks: runs delays.
    """

    def __init__(
        self,
        path: str,
        hello: dict[str, Any],
        pins: PinKeeper,
        clock: Clock,
        tasks: BackgroundTasks,
    ) -> None:
        self._path = path
        self._hello = _line(hello)
        self._pins = pins
        self._clock = clock
        self._tasks = tasks
        self._queue: deque[bytes] = deque()
        self._queued = asyncio.Event()

    def send(self, event: dict[str, Any], late_seconds: float = 0.0) -> None:
        """Queue an event, now or later. Never blocks; the oldest give way."""
        line = _line(event)
        if late_seconds:
            self._tasks.start(self._send_late(line, late_seconds), name="late-event")
        else:
            self._enqueue(line)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS)
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(
                    self._path, limit=_MAX_LINE_BYTES
                )
            except OSError:
                await self._clock.sleep(backoff.next_seconds())
                continue
            backoff.reset()
            try:
                writer.write(self._hello + _line(self._pins.snapshot()))
                await race(self._send_all(writer), self._receive(reader))
            except* (OSError, ValueError) as errors:  # both directions may break at once
                reason = str(errors.exceptions[0])
                _log.info("event_connection_broken", path=self._path, error=reason)
            finally:
                writer.close()
            await self._clock.sleep(backoff.next_seconds())

    async def _send_late(self, line: bytes, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._enqueue(line)

    def _enqueue(self, line: bytes) -> None:
        if len(self._queue) >= _MAX_QUEUED:
            self._queue.popleft()
        self._queue.append(line)
        self._queued.set()

    async def _send_all(self, writer: asyncio.StreamWriter) -> None:
        """Send what is queued; an event leaves the queue once it is sent."""
        while True:
            while self._queue:
                if writer.is_closing():  # where uvloop raises no OSError
                    raise ConnectionResetError("the sidecar has hung up")
                line = self._queue[0]
                writer.write(line)
                await writer.drain()
                if self._queue and self._queue[0] is line:
                    self._queue.popleft()
            self._queued.clear()
            await self._queued.wait()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            try:
                request = _REQUEST.decode(line)
            except msgspec.DecodeError as error:
                _log.warning("event_line_unreadable", error=str(error))
                continue
            if isinstance(request, _Release):
                self._pins.release(request.request_ids)
            else:
                self._pins.renew(request.pins)


def hello(spec: EngineSpec, identity: Identity) -> dict[str, Any]:
    """First event of a connection: which engine this is and what it can do."""
    return {
        "type": "hello",
        "contract_version": CONTRACT_VERSION,
        "engine_id": identity.engine_id,
        "epoch": identity.epoch,
        "kv_role": str(spec.kv_role),
        "vllm_version": spec.version_text,
        "nixl_version": "1.5.1",
        "block_size": spec.block_size,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_rank": 0,
        "kv_connector": "KvloopConnector",
        "kv_buffer_device": "cuda",
        "side_channel_host": spec.side_channel_host,
        "side_channel_port": spec.side_channel_port,
        "max_model_len": spec.max_model_len,
        "num_kv_blocks": spec.num_blocks,
        "bidirectional_kv_xfer": spec.bidirectional,
        "decoder_kv_blocks_ttl": spec.decoder_kv_blocks_ttl_seconds,
        "kv_recompute_threshold": spec.kv_recompute_threshold,
        "hybrid_kv_cache": False,
        "lease_renewal": spec.renews_pins,
        "kv_cache_dtype": "auto",
        "pin_lease_seconds": spec.retention_seconds if spec.renews_pins else 0.0,
        "kv_block_bytes": spec.profile.transfer_bytes(1, spec.block_size),
    }


def _line(event: dict[str, Any]) -> bytes:
    return msgspec.json.encode(event) + b"\n"
