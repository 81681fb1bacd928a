"""Frees decode memory as soon as the ledger no longer wants it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import grpc
import structlog

from kvloop.errors import KvloopError, OutOfRangeError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.common import long_streams
from services.common.backoff import Backoff
from services.worker.clock import Clock
from services.worker.event_hub import EventHub
from services.worker.event_messages import EngineRef, request_id_of
from services.worker.pins import ReleaseCause

_log = structlog.get_logger(__name__)

_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 2.0


@dataclass(frozen=True)
class Release:
    """One handle whose blocks nobody will ask for any more."""

    revision: int
    engine: EngineRef
    params: bytes
    cause: str
    """Name of a WatchReleasesResponse.Cause without its prefix."""


class ReleaseFeed(Protocol):
    """Where the ledger says what to free."""

    def releases(self, worker_id: str, after_revision: int) -> AsyncIterator[Release]:
        """All releases of a worker after a revision, then each as it comes.

        It ends now and then; whoever follows goes on after the last revision.

        Raises:
            OutOfRangeError: the ledger no longer remembers that far back.
            KvloopError: the ledger cannot be reached.
        """


class GrpcReleaseFeed:
    """The feed over gRPC.

    Args:
        channel: to kvmeta; not closed here.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)

    async def releases(self, worker_id: str, after_revision: int) -> AsyncIterator[Release]:
        """See `ReleaseFeed.releases`."""
        call = self._stub.WatchReleases(
            ledger_pb2.WatchReleasesRequest(worker_id=worker_id, after_revision=after_revision)
        )
        async with aclosing(long_streams.messages(call)) as messages:
            async for message in messages:
                yield Release(
                    revision=message.revision,
                    engine=EngineRef(message.engine.engine_id, message.engine.epoch),
                    params=message.handle.transfer_params_json,
                    cause=_cause_name(message.cause),
                )


class ReleaseFollower:
    """Passes the ledger's releases on to the engine.

    Args:
        feed: says what to free.
        hub: tells the engine.
        clock: paces retries.
        worker_id: this worker's name in the ledger.
    """

    def __init__(self, feed: ReleaseFeed, hub: EventHub, clock: Clock, worker_id: str) -> None:
        self._feed = feed
        self._hub = hub
        self._clock = clock
        self._worker_id = worker_id
        self._revision = 0

    async def run(self) -> None:
        """Follow the feed until cancelled. Outages of the ledger are waited out."""
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS)
        while True:
            try:
                async for release in self._feed.releases(self._worker_id, self._revision):
                    backoff.reset()
                    self._pass_on(release)
                    self._revision = release.revision
            except OutOfRangeError:
                # Blocks of releases that were forgotten fall at the engine's TTL.
                _log.warning("releases_missed", after_revision=self._revision)
                self._revision = 0
            except KvloopError as error:
                _log.info("release_feed_lost", reason=error.reason)
            await self._clock.sleep(backoff.next_seconds())

    def _pass_on(self, release: Release) -> None:
        identity = self._hub.identity
        request_id = request_id_of(release.params)
        if identity is None or identity.ref != release.engine or request_id is None:
            return  # another life's blocks went with it
        self._hub.release(release.engine, [request_id], _release_cause(release.cause))
        _log.info("blocks_released", revision=release.revision, cause=release.cause)


def _release_cause(name: str) -> ReleaseCause:
    try:
        return ReleaseCause(name.lower())
    except ValueError:
        return ReleaseCause.OTHER


def _cause_name(cause: ledger_pb2.WatchReleasesResponse.Cause.ValueType) -> str:
    try:
        name = ledger_pb2.WatchReleasesResponse.Cause.Name(cause)
    except ValueError:  # a newer ledger's cause
        return str(int(cause))
    return name.removeprefix("CAUSE_")
