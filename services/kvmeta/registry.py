"""The worker registry: who is alive, and who is let in."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum

import structlog

from kvloop.errors import OutOfRangeError, PreconditionError
from services.common.addresses import is_loopback, split_host_port
from services.kvmeta import bell, deadlines
from services.kvmeta.bell import Bell
from services.kvmeta.deadlines import Policy
from services.kvmeta.metrics import KvmetaMetrics
from services.kvmeta.model import (
    MICROSECONDS,
    Retained,
    Worker,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)
from services.kvmeta.store import Forgotten, RegistryStore

_log = structlog.get_logger(__name__)

CONTRACT_VERSIONS = frozenset({1, 2})
"""Versions of the handle format that workers may speak. The ledger never looks
inside a handle, but a prefill engine must understand what decode wrote."""


@dataclass(frozen=True, slots=True)
class LeaseBounds:
    """Leases that are granted, in microseconds."""

    default_us: int
    min_us: int
    max_us: int

    def granted_us(self, wanted_us: int) -> int:
        """The lease for a wish; 0 wishes for nothing in particular."""
        return min(max(wanted_us or self.default_us, self.min_us), self.max_us)


@dataclass(frozen=True, slots=True)
class Registered:
    """A granted lease."""

    lease_id: str
    lease_ttl_us: int
    voided_handles: int
    handle_ttl_us: int
    """How long the worker's handles are given out; 0 if it leaves none."""


class ChangeType(StrEnum):
    """Kind of a change that a watcher sees."""

    ADDED = "ADDED"
    CHANGED = "CHANGED"
    REMOVED = "REMOVED"
    SYNCED = "SYNCED"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the registry; no worker comes with SYNCED."""

    type: ChangeType
    worker: Worker | None
    revision: int


class Registry:
    """Workers and their leases.

    Args:
        store: where they are kept.
        policy: the deployment's durations.
        leases: leases that are granted.
        changed: rung when a worker changed; watchers wait for it.
        released: rung when a release was written.
        metrics: counts handles that became VOID.
        watch_poll_seconds: how often watchers look for other processes' changes.
    """

    def __init__(
        self,
        store: RegistryStore,
        policy: Policy,
        *,
        leases: LeaseBounds,
        changed: Bell,
        released: Bell,
        metrics: KvmetaMetrics,
        watch_poll_seconds: float,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._policy = policy
        self._leases = leases
        self._changed = changed
        self._released = released
        self._watch_poll_seconds = watch_poll_seconds

    async def register(self, worker: Worker, wanted_ttl_us: int) -> Registered:
        """Give the worker a lease.

        Raises:
            PreconditionError: LEDGER_TTL_TOO_LONG, LOOPBACK_SIDE_CHANNEL or
                CONTRACT_VERSION.
        """
        check_admission(worker, self._policy)
        lease_id = secrets.token_hex(16)
        lease_ttl_us = self._leases.granted_us(wanted_ttl_us)
        voided = await self._store.register(worker, lease_id, lease_ttl_us)
        self._changed.ring()
        self._metrics.voided(voided)
        _log.info(
            "worker_registered",
            worker=worker.worker_id,
            role=worker.role.value,
            engine=worker.engine.engine_id,
            voided_handles=voided,
        )
        return Registered(
            lease_id, lease_ttl_us, voided, handle_ttl_us=_handle_ttl_us(worker, self._policy)
        )

    async def keep_alive(self, lease_id: str, state: WorkerState | None) -> int:
        """Renew a lease; its TTL in microseconds, or 0 if it is gone."""
        renewal = await self._store.keep_alive(lease_id, state)
        if renewal is None:
            return 0
        if renewal.state_changed:
            self._changed.ring()
        return renewal.ttl_us

    async def deregister(self, lease_id: str) -> None:
        """End a lease, if it exists."""
        worker_id = await self._store.end_lease(lease_id)
        if worker_id is None:
            return
        self._changed.ring()
        self._released.ring()
        _log.info("worker_deregistered", worker=worker_id)

    async def page(
        self, model: str | None, role: WorkerRole | None, after: str, limit: int
    ) -> list[tuple[WorkerRecord, Retained]]:
        """Live workers above an id, by id."""
        return await self._store.workers(model, role, after, limit)

    async def watch(self, after_revision: int) -> AsyncGenerator[Change, None]:
        """The live workers, or what changed above a revision; SYNCED; then changes as
        they come. Never ends.

        Every change has a revision above those before it, also in the first state:
        a watcher may resume after any that it has handled. It may then be told of
        the removal of a worker that it has never seen.

        Args:
            after_revision: the last revision that the watcher has handled; 0 if none.

        Raises:
            OutOfRangeError: REVISION_FORGOTTEN.
        """
        rung = self._changed.listen()
        revision = after_revision
        if revision == 0:
            revision, records = await self._store.registry()
            for record in sorted(records, key=lambda each: each.revision):
                yield Change(ChangeType.ADDED, record.worker, record.revision)
        else:
            for record, change in await self._changes(revision):
                if change is not None:
                    yield change
                revision = record.revision
        yield Change(ChangeType.SYNCED, None, revision)
        while True:
            await bell.wait(rung, self._watch_poll_seconds)
            rung = self._changed.listen()
            for record, change in await self._changes(revision):
                if change is not None:
                    yield change
                revision = record.revision

    async def _changes(self, after_revision: int) -> list[tuple[WorkerRecord, Change | None]]:
        found = await self._store.worker_changes(after_revision)
        if isinstance(found, Forgotten):
            raise OutOfRangeError(
                f"worker changes after revision {after_revision} are not remembered; watch from 0",
                reason="REVISION_FORGOTTEN",
            )
        return [(record, _change(record, after_revision)) for record in found]


def check_admission(worker: Worker, policy: Policy) -> None:
    """Refuse a worker that could only do harm.

    Raises:
        PreconditionError: LEDGER_TTL_TOO_LONG, LOOPBACK_SIDE_CHANNEL or
            CONTRACT_VERSION.
    """
    traits = worker.traits
    if traits.contract_version not in CONTRACT_VERSIONS:
        accepted = ", ".join(map(str, sorted(CONTRACT_VERSIONS)))
        raise PreconditionError(
            f"the worker speaks version {traits.contract_version} of the handle format, "
            f"this ledger accepts {accepted}",
            reason="CONTRACT_VERSION",
            contract_version=traits.contract_version,
            accepted=accepted,
        )
    host, _ = split_host_port(worker.address)
    if is_loopback(traits.side_channel_host) and not is_loopback(host):
        raise PreconditionError(
            f"the NIXL side channel is on {traits.side_channel_host}, which other hosts cannot "
            f"reach, but the worker advertises {worker.address}; set the engine's side channel "
            "host",
            reason="LOOPBACK_SIDE_CHANNEL",
        )
    engine_ttl, wanted = traits.decoder_kv_blocks_ttl_us, policy.handle_ttl_us
    if not _leaves_handles(worker) or wanted is None:
        return
    margin = deadlines.margin_us(engine_ttl, policy)
    if wanted > engine_ttl - margin:
        raise PreconditionError(
            f"the ledger gives handles out for {wanted / MICROSECONDS:g} s, but the engine keeps "
            f"blocks for {engine_ttl / MICROSECONDS:g} s, of which a margin of "
            f"{margin / MICROSECONDS:g} s is not used",
            reason="LEDGER_TTL_TOO_LONG",
            handle_ttl_seconds=wanted / MICROSECONDS,
            engine_ttl_seconds=engine_ttl / MICROSECONDS,
        )


def _leaves_handles(worker: Worker) -> bool:
    return worker.role is WorkerRole.DECODE and worker.traits.bidirectional_kv_xfer


def _handle_ttl_us(worker: Worker, policy: Policy) -> int:
    if not _leaves_handles(worker):
        return 0
    engine_ttl = worker.traits.decoder_kv_blocks_ttl_us
    wanted = deadlines.wanted_ttl_us(engine_ttl, 0, None, policy)
    if worker.traits.pin_lease_us > 0:  # renewals carry the deadline to its end
        return wanted
    return deadlines.expire_time_us(wanted, engine_ttl, engine_ttl, policy)


def _change(record: WorkerRecord, after_revision: int) -> Change | None:
    """What a record is to a watcher that has handled a revision below it; None if
    the worker came and went in between."""
    was_there = record.added_revision <= after_revision
    if record.removed:
        kind = ChangeType.REMOVED if was_there else None
    else:
        kind = ChangeType.CHANGED if was_there else ChangeType.ADDED
    return Change(kind, record.worker, record.revision) if kind else None
