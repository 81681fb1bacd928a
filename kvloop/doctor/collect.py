"""Gathers the facts about a running stack. Whatever does not answer is a fact too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from kvloop.client import Client
from kvloop.doctor.facts import PREFILL, Facts, Probe, Service, WorkerFacts
from kvloop.durations import to_seconds
from kvloop.errors import KvloopError
from kvloop.inventory import list_conversations, list_workers, read_worker_info
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.tls import TlsSource

_T = TypeVar("_T")

_MAX_CONVERSATIONS = 1000
_CALLS_AT_ONCE = 16


def collect(
    *,
    router: str,
    kvmeta: str,
    sidecars: Sequence[str] = (),
    tenant: str = "default",
    tls: TlsSource | None = None,
    wall_clock: Callable[[], float],
    probe: Probe | None = None,
) -> Facts:
    """Everything that the services say now.

    Args:
        router: host:port of a router.
        kvmeta: host:port of kvmeta.
        sidecars: host:port of sidecars that should be registered.
        tenant: whose conversations to look at.
        tls: how to speak TLS; without it nothing is encrypted.
        wall_clock: seconds since the epoch.
        probe: what a probe showed, to go with it.
    """
    models, router_trouble = _attempt(lambda: _models(router, tls))
    entries, kvmeta_trouble = _attempt(lambda: list(list_workers(kvmeta, tls=tls)))
    conversations = None
    if not kvmeta_trouble:
        conversations, _ = _attempt(lambda: _conversations(kvmeta, tenant, tls))
    return Facts(
        router=Service(router, router_trouble),
        kvmeta=Service(kvmeta, kvmeta_trouble),
        models=models or (),
        workers=_workers(entries or (), sidecars, tls),
        conversations=tuple(conversations or ()),
        clock_offset_seconds=_clock_offset(conversations or (), wall_clock()),
        probe=probe,
    )


def _models(router: str, tls: TlsSource | None) -> tuple[str, ...]:
    with Client(router, tls=tls) as client:
        return tuple(model.name for model in client.models())


def _conversations(
    kvmeta: str, tenant: str, tls: TlsSource | None
) -> list[ledger_pb2.Conversation]:
    """The most recent ones: a ledger may hold millions."""
    found = list_conversations(kvmeta, tenant=tenant, page_size=_MAX_CONVERSATIONS, tls=tls)
    return list(islice(found, _MAX_CONVERSATIONS))


def _workers(
    entries: Sequence[registry_pb2.WorkerEntry], sidecars: Sequence[str], tls: TlsSource | None
) -> tuple[WorkerFacts, ...]:
    listed = {entry.worker.address for entry in entries}
    others = [address for address in sidecars if address not in listed]
    with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
        found = [
            *pool.map(lambda entry: _listed(entry, tls), entries),
            *pool.map(lambda address: _unlisted(address, tls), others),
        ]
    return tuple(sorted(found, key=lambda each: (each.worker.role != PREFILL, each.name)))


def _listed(entry: registry_pb2.WorkerEntry, tls: TlsSource | None) -> WorkerFacts:
    info, trouble = _attempt(lambda: read_worker_info(entry.worker.address, tls=tls))
    return WorkerFacts(
        entry.worker, info, trouble, listed=True, retained_blocks=entry.retained_blocks
    )


def _unlisted(address: str, tls: TlsSource | None) -> WorkerFacts:
    info, trouble = _attempt(lambda: read_worker_info(address, tls=tls))
    worker = info.worker if info is not None else registry_pb2.Worker(address=address)
    return WorkerFacts(worker, info, trouble, listed=False)


def _clock_offset(conversations: Sequence[ledger_pb2.Conversation], now: float) -> float | None:
    """The ledger's clock minus ours, from a deadline that it tells in both ways."""
    for each in conversations:
        remaining = to_seconds(each.remaining_ttl)
        if remaining > 0:
            return each.expire_time.ToMicroseconds() / 1e6 - remaining - now
    return None


def _attempt(call: Callable[[], _T]) -> tuple[_T | None, str]:
    """What the call gives, or None and why it gives nothing."""
    try:
        return call(), ""
    except KvloopError as error:
        return None, error.message
