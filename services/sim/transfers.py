"""Reads other engines' blocks: handshake, time, faults, and what is left in ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import structlog

from services.sim.blocks import BlockPool
from services.sim.connector import Load, Remote
from services.sim.faults import Fault, FaultKind, first
from services.sim.link import Link
from services.sim.peers import PeerError, PeerInfo, Peers
from services.sim.spec import EngineSpec
from services.sim.stats import EngineStats
from services.worker.clock import Clock
from services.worker.tasks import BackgroundTasks

_log = structlog.get_logger(__name__)

_EXPIRY_MARGIN_SECONDS = 5.0
"""How much earlier than the other engine's deadline a read is declined."""


class LoadResult(StrEnum):
    """How a read ended."""

    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    """Declined: the other engine's deadline has come, or nearly."""


class Transfers:
    """The reading side of one engine.

    Reads go over one link, one after the other.

    Args:
        spec: the engine.
        peers: the other engines.
        pool: blocks to fill.
        stats: counts.
        clock: the machine's clock.
        now: the engine's clock.
        tasks: runs reads.
        link: how fast they are.
    """

    def __init__(
        self,
        spec: EngineSpec,
        peers: Peers,
        pool: BlockPool,
        stats: EngineStats,
        clock: Clock,
        now: Callable[[], float],
        tasks: BackgroundTasks,
        link: Link,
    ) -> None:
        self._spec = spec
        self._peers = peers
        self._pool = pool
        self._stats = stats
        self._clock = clock
        self._now = now
        self._tasks = tasks
        self._link = link
        self._known: dict[str, tuple[PeerInfo, float]] = {}  # by engine id, with clock offset
        self._link_free_at = 0.0

    def start(
        self, load: Load, faults: Sequence[Fault], done: Callable[[LoadResult], None]
    ) -> None:
        """Begin a read.

        Args:
            load: what to read.
            faults: what goes wrong.
            done: called with the result, unless the engine ends before.
        """

        async def run() -> None:
            done(await self._run(load, faults))

        self._tasks.start(run(), name=f"transfer-{load.request_id}")

    def renew(self, remotes: Sequence[Remote]) -> None:
        """Ask other engines to keep blocks that requests here still wait to read."""
        by_engine: dict[tuple[str, str, int], list[str]] = {}
        for remote in remotes:
            key = (remote.engine_id, remote.host, remote.port)
            by_engine.setdefault(key, []).append(remote.request_id)
        for (engine_id, host, port), request_ids in by_engine.items():
            self._tasks.start(
                self._renew(engine_id, host, port, request_ids), name=f"renew-{engine_id}"
            )

    async def _run(self, load: Load, faults: Sequence[Fault]) -> LoadResult:
        remote = load.remote
        try:
            peer, offset = await self._meet(remote, faults)
        except PeerError as error:
            self._stats.nixl_num_failed_handshakes += 1
            _log.warning("handshake_failed", engine=remote.engine_id, error=str(error))
            return LoadResult.FAILED
        if not load.local_blocks:
            await self._notify(remote, peer)
            return LoadResult.DONE
        if self._is_expired(load, offset):
            self._stats.nixl_num_declined_reads += 1
            return LoadResult.EXPIRED
        try:
            await self._read(load, peer, faults)
        except PeerError as error:
            self._stats.nixl_num_failed_transfers += 1
            self._known.pop(remote.engine_id, None)
            _log.warning("transfer_failed", engine=remote.engine_id, error=str(error))
            return LoadResult.FAILED
        return LoadResult.DONE

    async def _meet(self, remote: Remote, faults: Sequence[Fault]) -> tuple[PeerInfo, float]:
        if first(faults, FaultKind.LOSE_HANDSHAKE):
            raise PeerError("injected fault")
        known = self._known.get(remote.engine_id)
        if known is not None:
            return known
        await self._wait(self._spec.profile.handshake_seconds)
        peer = await self._peers.meet(remote.host, remote.port)
        if peer.engine_id != remote.engine_id:
            raise PeerError(f"expected engine {remote.engine_id}, found {peer.engine_id}")
        known = self._known[remote.engine_id] = (peer, peer.clock - self._now())
        return known

    def _is_expired(self, load: Load, offset: float) -> bool:
        if not load.is_readback or load.remote.deadline is None:
            return False
        return self._now() + _EXPIRY_MARGIN_SECONDS >= load.remote.deadline - offset

    async def _read(self, load: Load, peer: PeerInfo, faults: Sequence[Fault]) -> None:
        count = len(load.local_blocks)
        remote = load.remote
        if count > len(remote.blocks):
            raise PeerError(f"{count} blocks to fill, but the params name {len(remote.blocks)}")
        seconds = self._link.over(self._spec.profile).transfer(count, self._spec.block_size)
        slow = first(faults, FaultKind.SLOW_TRANSFER)
        start = max(self._clock.monotonic(), self._link_free_at)
        self._link_free_at = start + seconds * self._spec.time_scale
        await self._clock.sleep(self._link_free_at - self._clock.monotonic())
        if slow is not None:
            await self._clock.sleep(slow.seconds)
        if first(faults, FaultKind.FAIL_TRANSFER):
            raise PeerError("injected fault")
        # Positional, and aligned at the end: the local prefix cache covers the start.
        contents = await self._peers.read(
            remote.host, remote.port, peer.epoch, remote.blocks[-count:], remote.request_id
        )
        if len(contents) != count:
            raise PeerError(f"{count} blocks asked for, {len(contents)} received")
        self._pool.memory.update(zip(load.local_blocks, contents, strict=True))
        self._stats.nixl_xfer_time_seconds.observe(seconds)
        self._stats.nixl_bytes_transferred.observe(
            self._spec.profile.transfer_bytes(count, self._spec.block_size)
        )
        self._stats.nixl_num_descriptors.observe(count * self._spec.profile.descriptors_per_block)

    async def _notify(self, remote: Remote, peer: PeerInfo) -> None:
        try:
            await self._peers.notify(remote.host, remote.port, peer.epoch, remote.request_id)
        except PeerError as error:
            self._stats.nixl_num_failed_notifications += 1
            _log.warning("notification_failed", engine=remote.engine_id, error=str(error))

    async def _renew(self, engine_id: str, host: str, port: int, request_ids: list[str]) -> None:
        try:
            known = self._known.get(engine_id)
            peer = known[0] if known else await self._peers.meet(host, port)
            if peer.engine_id == engine_id:
                await self._peers.renew(host, port, peer.epoch, request_ids)
        except PeerError as error:
            _log.info("renewal_failed", engine=engine_id, error=str(error))

    async def _wait(self, seconds: float) -> None:
        if seconds and self._spec.time_scale:
            await self._clock.sleep(seconds * self._spec.time_scale)
